"""gpt.py bench: attention timed over a sweep of sizes, contenders in turn, each result verified first.

A cell is one contender at one size, tile and number of threads. The cells of one size and number of threads
are a group: they get the same inputs, are held against one float64 result, and are timed in turn, round by
round, so that whatever else the machine does meets all of them alike. lab.timing says what a round is. The
rounds are spread over passes through the whole sweep: neighbours slow a machine for seconds at a time, and
within a pass a matrix has the same pages of memory in every round. A round in which the system handed out
pages anew is measured again: clearing them can take half as long as attention. Cells whose medians are not
firm after all passes, or of which too few rounds were undisturbed, are timed in further ones, alone. They end
when a median looks firm, so its interval is a little less sure than it says.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_ext import PARTS, SIMD, attention, extension, reference, tiles
from attention_ext.parts import resolve_simd
from lab import costs, machine
from lab.correctness import allocated
from lab.timing import calm, clock, interval, quartiles, spread

TOLERANCE = 1e-4  # of the largest expected value: what is off by more is wrong, not slow
ROUNDS, MIN_TIME = 10, 0.2
PASSES = 5  # through the sweep, among which the rounds are divided
FURTHER, SHARE = 8, 0.25  # passes through what is not firm, at most, and their share of the time so far
FIRM = 0.025  # a median whose interval is wider than this either way is not: two can be twice as far apart
FAULT, PAGES = 1e-6, 0.01  # seconds of a page fault, about; their share of a round that is measured again
TRIES = 4  # of such a round at most, and then no more in this pass
SHORT = 0.02  # seconds; before shorter calls an untimed one clears the caches of what the last one left
BURST = 0.005  # seconds between two samples of the bandwidth, about; others come and go in some 10 ms
PATIENCE, WAITING = 0.01, 0.1  # seconds to wait for a fast sample, and their share of the time, at most
PRIMED = 20  # samples before the first round, by which it is known what is fast
LEAST = 6  # rounds that count, however disturbed; of fewer no interval() is sure

Call = Callable[[], Tensor]
Spent = Generator[tuple["Cell", float], None, None]  # a cell with the seconds that were just spent on it


@dataclass(frozen=True)
class Cell:
    """One contender at one case: q is (batch, heads, queries, d), k and v are (batch, heads, N, d).

    simd, br, bc: None where the contender has none.
    """

    contender: str
    simd: str | None
    N: int
    queries: int
    d: int
    batch: int
    heads: int
    causal: bool
    br: int | None
    bc: int | None
    threads: int

    @property
    def group(self) -> tuple:
        """Equal for cells that are timed together."""
        return self.N, self.queries, self.d, self.batch, self.heads, self.causal, self.threads

    @property
    def flops(self) -> float:
        """Useful floating-point operations of one call."""
        return costs.flops(self.queries, self.N, self.d, self.batch * self.heads, self.causal)

    @property
    def memory(self) -> int:
        """Bytes of q, k, v, the output, and what verifying it takes in float64."""
        B, H, Nq, Nk, d = self.batch, self.heads, self.queries, self.N, self.d
        return B * H * d * (Nq * (2 * 4 + 4 * 8) + Nk * (2 * 4 + 2 * 8))

    def costs(self, heads: int, threads: int, block: costs.Block = costs.Block()) -> costs.Costs:
        """What so many of its heads cost a part by its own count; see lab.costs.costs()."""
        tile = {"br": self.br, "bc": self.bc} if self.br and self.bc else {}
        return costs.costs(
            self.contender,
            self.queries,
            self.N,
            self.d,
            heads=heads,
            causal=self.causal,
            threads=threads,
            block=block,
            **tile,
        )

    def traffic(self, cache: int) -> float | None:
        """Bytes that a cache takes in, by the part's own count; None for what is not a part."""
        if self.contender not in PARTS:
            return None
        return self.costs(self.batch * self.heads, self.threads).traffic(cache)


@dataclass
class Result:
    """What became of a cell. status: 'ok', 'wrong' or 'skipped', which `note` explains.

    error: the largest difference from float64, at index error_at. scratch: the most bytes that PyTorch's
    allocator gave out beyond the output; None for what allocates by itself. seconds: of each round, those of
    the first pass first. paces: of each round too, the bandwidth beside it as a share of the fastest.
    """

    cell: Cell
    status: str = "ok"
    note: str | None = None
    error: float | None = None
    error_at: tuple[int, ...] | None = None
    scratch: int | None = None
    seconds: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    @property
    def counted(self) -> list[float]:
        """Seconds of the rounds that nobody slowed, LEAST of them at least."""
        return calm(self.seconds, self.paces, LEAST)

    @property
    def median(self) -> float | None:
        """Seconds of a call."""
        return statistics.median(self.counted) if self.seconds else None

    @property
    def margin(self) -> float | None:
        """Half the width of the median's interval(), as a share of the median."""
        if not self.seconds:
            return None
        low, high = interval(self.counted)
        return (high - low) / 2 / statistics.median(self.counted)


@dataclass
class Run:
    """A sweep's results and what they were measured on.

    peaks: floating-point operations per second, bandwidths: bytes per second read from beyond the cache of
    `cache` bytes, the last that is a core's own; both by number of threads. busy: why the figures are not
    firm. complete: False if it was stopped.
    """

    machine: dict
    rounds: int
    min_time: float
    cache: int
    peaks: dict[int, float] = field(default_factory=dict)
    bandwidths: dict[int, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    busy: str | None = None
    complete: bool = False


def contenders() -> dict[str, Callable[..., Call]]:
    """Who can take part: name -> a function of a cell and its q, k, v that gives the call to time."""
    return {part: _part for part in PARTS} | {"sdpa": _sdpa, "onnx": _onnx}


def plan(
    names: Sequence[str],
    *,
    lengths: Sequence[int] = (1024,),
    widths: Sequence[int] = (32,),
    queries: int | None = None,
    batch: int = 1,
    heads: int = 4,
    masks: Sequence[bool] = (False,),
    br: Sequence[int | None] = (None,),
    bc: Sequence[int | None] = (None,),
    threads: Sequence[int] = (1,),
    simds: Sequence[str] = ("auto",),
) -> list[Cell]:
    """The cells of a sweep: every contender at every length, width, mask and number of threads.

    queries: as many as keys unless given. br, bc: part 4's tiles, None for the tuned one. simds: of SIMD.
    Raises ValueError naming the argument that is wrong.
    """
    for what, chosen, known in (("contender", names, contenders()), ("simd", simds, SIMD)):
        for name in chosen:
            if name not in known:
                raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(known)}")
        if len(set(chosen)) < len(chosen) or not chosen:
            raise ValueError(f"{what} is {','.join(chosen)!r}; it must name one or more, each once")
    cells = []
    for N, d, causal, count in itertools.product(lengths, widths, masks, threads):
        if causal and queries not in (None, 1, N):
            raise ValueError(
                f"queries is {queries}; with a causal mask it must be 1 or N={N}: PyTorch's is another"
            )
        causal = causal and queries != 1  # one query sees all keys
        for name in names:
            part = PARTS.get(name)
            for simd in simds if part and part.operator else (None,):
                tile_sizes = itertools.product(br, bc) if part and part.tiled else ((None, None),)
                for rows, columns in tile_sizes:
                    if part and part.tiled:
                        tuned = tiles.tile(resolve_simd(simd), count, d, N, causal)
                        rows, columns = rows or tuned[0], columns or tuned[1]
                    cells.append(
                        Cell(name, simd, N, queries or N, d, batch, heads, causal, rows, columns, count)
                    )
    return list(dict.fromkeys(cells))


def check_memory(cells: Sequence[Cell]) -> None:
    """Raise ValueError if a cell's inputs and outputs alone are more than this machine has free."""
    available = machine.available_memory()
    for cell in cells:
        if available is not None and cell.memory > available:
            raise ValueError(
                f"N={cell.N}, queries={cell.queries}, d={cell.d}, heads={cell.heads}, batch={cell.batch} "
                f"need {machine.size_text(cell.memory)}, and {machine.size_text(available)} are free"
            )


class Bench:
    """A sweep that can be stopped: `done` is what run() has measured; `again`, if in further passes."""

    def __init__(self, cells: Sequence[Cell], rounds: int = ROUNDS, min_time: float = MIN_TIME) -> None:
        if rounds < 2:
            raise ValueError(f"rounds is {rounds}; it must be at least 2")
        check_memory(cells)
        self.cells = list(cells)
        core = machine.caches()[:2][-1]  # the second level is a core's own nearly everywhere
        self.done = Run(machine.describe(), rounds, min_time, core.size)
        self.again = False
        self._exact: tuple[tuple, Tensor] | None = None
        self._load, self._start, self._waited = machine.Load(), time.perf_counter(), 0.0

    def run(self) -> Spent:
        """Measure; gives each cell with the seconds that were just spent on it.

        A KeyboardInterrupt stops it; the rounds that every cell of a group has had are kept.
        """
        before = torch.get_num_threads()
        machine.keep_freed_memory()
        try:
            with torch.inference_mode():
                simds = dict.fromkeys(cell.simd for cell in self.cells if cell.simd)
                names = [extension.load(simd).simd_name() for simd in simds or ("auto",)]
                self.done.machine["simd_name"] = "; ".join(names)
                for threads in dict.fromkeys(cell.threads for cell in self.cells):
                    torch.set_num_threads(threads)
                    self._limits(threads)
                self._load, self._start = machine.Load(), time.perf_counter()  # the compilers are done
                for _ in range(PRIMED):
                    self._pace()
                first, *later = spread(self.done.rounds, PASSES)
                right = []
                for _, group in itertools.groupby(self.cells, key=lambda cell: cell.group):
                    verified = yield from self._verify(list(group))
                    if verified:
                        right.append(verified)
                        yield from self._time(verified, first)
                self._exact = None
                for rounds in later:
                    machine.return_freed_memory()
                    for verified in right:
                        yield from self._time(verified, rounds)
                self.done.complete = True
                yield from self._go_on(right, SHARE * (time.perf_counter() - self._start))
        finally:
            torch.set_num_threads(before)
            if self.done.complete:
                threads = max(self.done.peaks)
                peaks = [self.done.peaks[threads], machine.fma_peak(threads=threads)]
                self.done.busy = machine.busy(self._load, peaks, threads)

    def _limits(self, threads: int) -> None:
        """What so many threads can do at most."""
        self.done.peaks[threads] = machine.fma_peak(threads=threads)
        self.done.bandwidths[threads] = machine.read_bandwidth(4 * self.done.cache, threads)

    def _pace(self, wait: bool = False) -> float:
        """The bandwidth beyond a core's own caches, as a share of the fastest so far.

        wait: until that is fast, for PATIENCE at most, and for WAITING of the time since the first sample.
        """
        start = time.perf_counter()
        patient = wait and self._waited < WAITING * (start - self._start)
        pace = self._load.sample(4 * self.done.cache, PATIENCE if patient else 0.0)
        self._waited += (time.perf_counter() - start) * wait
        return pace

    def _verify(self, group: list[Cell]) -> Generator[tuple[Cell, float], None, list[tuple[Result, float]]]:
        """Add the group's results; gives those that are right, with the seconds of a call."""
        torch.set_num_threads(group[0].threads)
        q, k, v = inputs(group[0])
        exact = self._expected(group[0], q, k, v)
        right = []
        for cell in group:
            start = time.perf_counter()
            result, call = verify(cell, q, k, v, exact)
            self.done.results.append(result)
            if call:
                once = time.perf_counter()
                call()
                right.append((result, time.perf_counter() - once))
            yield cell, time.perf_counter() - start
        return right

    def _go_on(self, groups: list[list[tuple[Result, float]]], seconds: float) -> Spent:
        """Further passes through the cells of _verify() that are not firm, for so long; few threads first."""
        end, self.again = time.perf_counter() + seconds, True
        rounds, least = spread(self.done.rounds, PASSES)[0], self.done.min_time / self.done.rounds

        def loose(result: Result) -> bool:
            fast = sum(pace >= machine.SLOWED for pace in result.paces)
            return (result.margin or 0) > FIRM or fast < min(LEAST, self.done.rounds)

        for threads in sorted({group[0][0].cell.threads for group in groups}):
            alike = [group for group in groups if group[0][0].cell.threads == threads]
            for _ in range(FURTHER):
                again = [[each for each in group if loose(each[0])] for group in alike]
                if not any(again):
                    break
                machine.return_freed_memory()
                for group in filter(None, again):
                    will_take = (rounds + 1) * sum(max(once, least) for _, once in group)
                    if time.perf_counter() + will_take < end:
                        yield from self._time(group, rounds)

    def _time(self, group: list[tuple[Result, float]], rounds: int) -> Spent:
        """Time what _verify() gave for so many rounds, on inputs made anew."""
        cell = group[0][0].cell
        torch.set_num_threads(cell.threads)
        q, k, v = inputs(cell)
        before = [len(result.seconds) for result, _ in group]
        running: list[tuple[Result, Call, bool, list[int]]] = []
        faulting = set()  # cells that get new pages in every call
        for result, once in group:
            call = contenders()[result.cell.contender](result.cell, q, k, v)
            repeats = max(1, math.ceil(self.done.min_time / self.done.rounds / once))
            bursts = spread(repeats, max(1, round(repeats * once / BURST)))
            running.append((result, call, once < SHORT, bursts))
        try:
            for _ in range(rounds):
                for result, call, short, bursts in running:
                    if short:
                        call()
                    timed = clock(call, bursts, self._pace)
                    lost, tries = 0.0, 1
                    while timed.pages * FAULT > PAGES * timed.spent and result.cell not in faulting:
                        # The allocator chose memory that this pass had not used before: now its pages stay.
                        lost, tries = lost + timed.spent, tries + 1
                        timed = clock(call, bursts, self._pace)
                        if tries == TRIES:
                            faulting.add(result.cell)
                    result.seconds.append(timed.seconds)
                    result.paces.append(timed.pace)
                    yield result.cell, lost + timed.spent
        finally:  # stopped in the middle of a round: all keep as many of these rounds
            fewest = min(len(result.paces) - had for (result, *_), had in zip(running, before))
            for (result, *_), had in zip(running, before):
                del result.seconds[had + fewest :], result.paces[had + fewest :]

    def _expected(self, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The exact output (B, H, Nq, d) in float64; the last one is kept, as other threads take the same."""
        case = cell.group[:-1]
        if self._exact is None or self._exact[0] != case:
            exact, _ = reference.flash_attention(
                q.double(), k.double(), v.double(), causal=cell.causal, br=512, bc=512
            )
            self._exact = case, exact
        return self._exact[1]


def inputs(cell: Cell) -> list[Tensor]:
    """q (B, H, Nq, d), k and v (B, H, N, d): random, the same for all cells of a group."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(cell.batch, cell.heads, n, cell.d, generator=generator)
        for n in (cell.queries, cell.N, cell.N)
    ]


def verify(cell: Cell, q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> tuple[Result, Call | None]:
    """Hold a cell against the exact output (B, H, Nq, d); gives the call to time, if there is one."""
    scores = cell.queries * cell.N * 4
    need = {"part0": 3 * cell.batch * cell.heads, "part1": 1, "part2": 1}.get(cell.contender, 0) * scores
    available = machine.available_memory()
    if available is not None and need > available:
        note = f"needs {machine.size_text(need)}, and {machine.size_text(available)} are free"
        return Result(cell, "skipped", note), None
    call = contenders()[cell.contender](cell, q, k, v)
    out, memory = allocated(call)
    error = (out - exact).abs().nan_to_num(nan=torch.inf)  # (B, H, Nq, d)
    worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    result = Result(cell, error=float(error[worst]), error_at=worst)
    if cell.contender != "onnx":
        result.scratch = max(0, memory - out.numel() * out.element_size())
    if not error[worst] <= TOLERANCE * float(exact.abs().max()):
        result.status = "wrong"
        result.note = f"at {worst}: expected {float(exact[worst]):.6g}, got {float(out[worst]):.6g}"
        return result, None
    return result, call


def _part(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    simd = cell.simd or "auto"
    return partial(attention, cell.contender, q, k, v, causal=cell.causal, br=cell.br, bc=cell.bc, simd=simd)


def _sdpa(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """PyTorch's scaled_dot_product_attention on contiguous inputs."""
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=cell.causal)


def _onnx(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """ONNX Runtime's MultiHeadAttention on inputs (B, N, H d), its own layout."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        raise ValueError(
            "contender 'onnx' needs ONNX Runtime: pip install -c constraints.txt -e '.[bench]'"
        ) from None
    B, H, d = cell.batch, cell.heads, cell.d
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=H,
        scale=d**-0.5,
        unidirectional=int(cell.causal),
    )
    value = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [B, t.shape[2], H * d])
        for n, t in (("q", q), ("k", k), ("v", v), ("o", q))
    ]
    graph = helper.make_graph([node], "attention", value[:3], value[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cell.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feed = {n: t.transpose(1, 2).reshape(B, -1, H * d).numpy() for n, t in (("q", q), ("k", k), ("v", v))}

    def call() -> Tensor:
        out = torch.from_numpy(session.run(None, feed)[0])
        return out.view(B, -1, H, d).transpose(1, 2)

    return call


def row(run: Run, result: Result) -> dict:
    """A result as a flat row of figures; None where there is none.

    ms, iqr_ms: median and interquartile range. low_ms, high_ms: the median's interval(); margin: half its
    width, as a share of the median. left_out: rounds that do not count, as others slowed them. gbps: bytes
    that come into the last of a core's own caches, by the part's own count. over_part0, over_sdpa: how many
    times as fast as they are in the same group.
    """
    cell, median = result.cell, result.median
    named = asdict(cell) | {"status": result.status, "note": result.note, "error": result.error}
    figures: dict[str, float | None] = dict.fromkeys(
        (
            "ms",
            "iqr_ms",
            "low_ms",
            "high_ms",
            "margin",
            "left_out",
            "gflops",
            "gbps",
            "peak_share",
            "bandwidth_share",
            "over_part0",
            "over_sdpa",
        )
    )
    if median is not None:
        first, third = quartiles(result.counted)
        low, high = interval(result.counted)
        figures |= {"ms": 1e3 * median, "iqr_ms": 1e3 * (third - first)}
        figures |= {"low_ms": 1e3 * low, "high_ms": 1e3 * high, "margin": result.margin}
        figures["left_out"] = len(result.seconds) - len(result.counted)
        figures["gflops"] = cell.flops / median / 1e9
        figures["peak_share"] = cell.flops / median / run.peaks[cell.threads]
        traffic = cell.traffic(run.cache)
        if traffic is not None:
            figures["gbps"] = traffic / median / 1e9
            figures["bandwidth_share"] = traffic / median / run.bandwidths[cell.threads]
        for name in ("part0", "sdpa"):
            other = _median_of(run, name, cell.group)
            figures[f"over_{name}"] = None if other is None else other / median
    return named | figures | {"scratch": result.scratch}


def _median_of(run: Run, contender: str, group: tuple) -> float | None:
    for result in run.results:
        if result.cell.contender == contender and result.cell.group == group:
            return result.median
    return None
