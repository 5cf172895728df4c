"""gpt.py bench: attention timed over a sweep of sizes, contenders in turn, each result verified first.

The cells of one size and number of threads are a group: they share their inputs and one float64 result. They
are timed in turn, round by round (lab.timing), so that disturbances affect all of them. The rounds are spread
over passes through the whole sweep: other programs slow a machine for seconds at a time, and within a pass a
matrix has the same pages of memory in every round. A round in which the system gave new pages is measured
again: clearing them can take half as long as attention. Further passes time the cells whose medians are not
firm, or with too few quiet rounds; an interval's confidence is slightly lower than stated for that.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext import PARTS, extension, processor, reference
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab import backward, machine, memory, rules
from shakespeare.lab.bench.cases import check_memory
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.contenders import Call, contenders, first_line, prepared
from shakespeare.lab.bench.results import FEWEST_COUNTED_ROUNDS, FIRM_MARGIN, Result, Run
from shakespeare.lab.correctness import allocated
from shakespeare.lab.costs import block_of, scratch
from shakespeare.lab.timing import PATIENCE, WARM_UP_SAMPLES, seconds_of, spread, time_round
from shakespeare.lab.traffic import streams
from shakespeare.lab.traffic import traffic as total

# Largest error over the largest expected value. bfloat16 rounds by up to 0.4 %, float16 by 0.05 %.
WRONG_ERROR = {Dtype.FP32: 1e-4, Dtype.BF16: 1e-2, Dtype.FP16: 2e-3}
ROUNDS, MIN_TIME_SECONDS = 10, 0.2
PAGE_FAULT_SECONDS = 1e-6  # about
MOST_FAULT_SHARE = 0.01  # share of a round's time; with more, the round is measured again
SLICE = 2**24  # float64 scores that exact_output() holds at once
MOST_TRIES = 4  # tries of such a round; then the cell is not timed again in this pass
# Before shorter calls, an untimed one clears the caches of the last contender's data.
SHORT_CALL_SECONDS = 0.02
BURST_SECONDS = 0.005  # time between two samples of the speed; disturbances take some 10 ms
BUFFER_CACHES = 4  # a sample of the bandwidth reads this many times the size of the core's last own cache
PASSES, FURTHER_PASSES = 5, 8  # through the sweep, and at most through the cells that are not firm
FURTHER_SHARE = 0.25  # share of the time so far that further passes may take
WAIT_SHARE = 0.1  # of the time, for all waits for a fast sample

Allocated = Callable[[Call], tuple[Any, int]]
Verified = tuple[Result, float]  # a correct result with the seconds of a call


class Bench:
    """A sweep that can be stopped: `done` holds the results of run().

    again: whether run() is in further passes. Raises ValueError for cells that do not fit the memory.
    """

    def __init__(
        self, cells: Sequence[Cell], rounds: int = ROUNDS, min_time: float = MIN_TIME_SECONDS
    ) -> None:
        check_memory(cells)
        self.cells = list(cells)
        core = processor.caches()[:2][-1]  # the second level belongs to one core nearly everywhere
        self.done = Run(machine.describe(), rounds, min_time, core.size)
        self.again = False
        self._exact: tuple[tuple, tuple[Tensor, ...]] | None = None

    def run(self) -> Generator[Cell, None, None]:
        """Measure; yield each cell when it is verified and after each round. Ctrl-C keeps complete rounds."""
        before = torch.get_num_threads()
        memory.keep_freed_memory()
        try:
            with torch.inference_mode(not any(cell.backward for cell in self.cells)):
                yield from self._run()
        finally:
            torch.set_num_threads(before)
            if self.done.complete:
                threads = max(self.done.peaks)
                peaks = [self.done.peaks[threads], machine.fma_peak(threads=threads)]
                self.done.busy = machine.busy(self._load, peaks, threads)

    def _run(self) -> Iterator[Cell]:
        simds = dict.fromkeys(cell.simd for cell in self.cells if cell.simd)
        names = [extension.load(simd).simd_name() for simd in simds or ("auto",)]
        self.done.machine["simd_name"] = "; ".join(names)
        for threads in dict.fromkeys(cell.threads for cell in self.cells):
            torch.set_num_threads(threads)
            self.done.peaks[threads] = machine.fma_peak(threads=threads)
            self.done.bandwidths[threads] = machine.read_bandwidth(BUFFER_CACHES * self.done.cache, threads)
            if any(cell.dtype == Dtype.BF16 for cell in self.cells) and (peak := machine.amx_peak(threads)):
                self.done.amx_peaks[threads] = peak
        self._load, self._began, self._waited = machine.Load(), time.perf_counter(), 0.0  # after compilers
        for _ in range(WARM_UP_SAMPLES):
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
            memory.return_freed_memory()
            for verified in right:
                yield from self._time(verified, rounds)
        self.done.complete = True
        yield from self._time_again(right, FURTHER_SHARE * (time.perf_counter() - self._began))

    def _pace(self, wait: bool = False) -> float:
        """The machine's speed, shared cache included, over the fastest so far. wait: for a fast one."""
        start = time.perf_counter()
        patient = wait and self._waited < WAIT_SHARE * (start - self._began)
        pace = self._load.sample(BUFFER_CACHES * self.done.cache, PATIENCE if patient else 0.0)
        if wait:
            self._waited += time.perf_counter() - start
        return pace

    def _verify(self, group: list[Cell]) -> Generator[Cell, None, list[Verified]]:
        """Add the group's results; return the correct ones with the seconds of a call."""
        torch.set_num_threads(group[0].threads)
        tensors = inputs(group[0])
        if self._exact is None or self._exact[0] != group[0].inputs:  # other numbers of threads share it
            self._exact = group[0].inputs, exact_of(group[0], tensors)
        right = []
        for cell in group:
            result, call = verify(cell, tensors, self._exact[1])
            self.done.results.append(result)
            if call:
                result.traffic = traffic(cell, self.done.cache)
                with skipping(result):
                    right.append((result, seconds_of(call)))
            yield cell
        return right

    def _time_again(self, groups: list[list[Verified]], seconds: float) -> Iterator[Cell]:
        """Time the cells that are not firm in further passes, for `seconds`, few threads first."""
        end, self.again = time.perf_counter() + seconds, True
        rounds = spread(self.done.rounds, PASSES)[0]
        least = self.done.min_time / self.done.rounds

        def loose(result: Result) -> bool:
            quiet = sum(pace >= machine.SLOWED_BELOW for pace in result.paces)
            wanted = min(FEWEST_COUNTED_ROUNDS, self.done.rounds)
            return (result.margin or 0) > FIRM_MARGIN or quiet < wanted

        groups.sort(key=lambda group: group[0][0].cell.threads)
        for _, alike in itertools.groupby(groups, key=lambda group: group[0][0].cell.threads):
            left = list(alike)
            for _ in range(FURTHER_PASSES):
                left = [again for group in left if (again := [of for of in group if loose(of[0])])]
                if not left:
                    break
                memory.return_freed_memory()
                for group in left:
                    will_take = (rounds + 1) * sum(max(once, least) for _, once in group)
                    if time.perf_counter() + will_take < end:
                        yield from self._time(group, rounds)

    def _time(self, group: list[Verified], rounds: int) -> Iterator[Cell]:
        """Time the results of _verify() for `rounds` rounds on new inputs."""
        cell = group[0][0].cell
        torch.set_num_threads(cell.threads)
        tensors = inputs(cell)
        running: list[tuple[Result, Callable[[], None]]] = []
        faulting = set[Cell]()  # cells that get new pages in every call
        for result, once in group:
            with skipping(result):
                call = prepared(result.cell, *tensors)
                running.append((result, partial(self._round, result, call, once, faulting)))
        yield from in_rounds(running, rounds)

    def _round(self, result: Result, call: Call, once: float, faulting: set[Cell]) -> None:
        """Add a round to a result."""
        repeats = max(1, math.ceil(self.done.min_time / self.done.rounds / once))
        bursts = spread(repeats, max(1, round(repeats * once / BURST_SECONDS)))
        if once < SHORT_CALL_SECONDS:
            call()
        for _ in range(1 if result.cell in faulting else MOST_TRIES):
            timed = time_round(call, bursts, self._pace)
            # The allocator chose memory that is new in this pass; its pages stay from now on.
            if timed.pages * PAGE_FAULT_SECONDS <= MOST_FAULT_SHARE * timed.spent:
                break
        else:
            faulting.add(result.cell)
        result.seconds.append(timed.seconds)
        result.every.append(timed.every)
        result.paces.append(timed.pace)


@contextmanager
def skipping(result: Result) -> Iterator[None]:
    """Skip a contender that raises an error, with the reason."""
    try:
        yield
    except Exception as error:  # packages raise types of their own
        full = "needs more memory than the GPU has free"
        result.note = full if isinstance(error, torch.OutOfMemoryError) else first_line(error)
        result.status, result.seconds, result.every, result.paces = "skipped", [], [], []


def in_rounds(running: Sequence[tuple[Result, Callable[[], None]]], rounds: int) -> Iterator[Cell]:
    """Let results take turns: a function adds a round to each. An interrupt leaves equally many rounds."""
    before = [len(result.paces) for result, _ in running]
    try:
        for _ in range(rounds):
            for result, add_round in running:
                if result.status == "ok":
                    with skipping(result):
                        add_round()
                    yield result.cell
    finally:
        both = [(result, had) for (result, _), had in zip(running, before) if result.status == "ok"]
        fewest = min((len(result.paces) - had for result, had in both), default=0)
        for result, had in both:
            for kept in (result.seconds, result.every, result.paces):
                del kept[had + fewest :]


def inputs(cell: Cell, device: torch.device | str = "cpu") -> list[Tensor]:
    """q (B, H, Nq, d), k and v (B, H, N, d), and for gradients dout: random, the same for all of a group."""
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, Dtype(cell.dtype).torch_name)
    rows = (cell.queries, cell.N, cell.N, cell.queries)[: 3 + cell.backward]
    shapes = ((cell.batch, cell.heads, n, cell.d) for n in rows)
    return [torch.randn(shape, generator=generator, device=device).to(kind) for shape in shapes]


def exact_output(tensors: Sequence[Tensor], causal: bool, ruled: str | None = None) -> Tensor:
    """The output (B, H, Nq, d) in float64, in slices of heads and queries whose scores fit the memory."""
    if ruled:
        return rules.exact(list(tensors), ruled, causal)
    (B, H, Nq, d), Nk = tensors[0].shape, tensors[1].shape[2]
    rows = max(1, min(Nq, SLICE // Nk))
    heads = max(1, SLICE // (rows * Nk))
    q, k, v = (t.reshape(1, B * H, -1, d) for t in tensors)
    out = torch.empty(1, B * H, Nq, d, dtype=torch.float64, device=q.device)
    for h, i in itertools.product(range(0, B * H, heads), range(0, Nq, rows)):
        end = min(Nq, i + rows)
        seen = end + Nk - Nq if causal else Nk
        spans = ((q, i, end), (k, 0, seen), (v, 0, seen))
        slices = (t[:, h : h + heads, first:last].double() for t, first, last in spans)
        o = reference.attention(*slices, causal=causal, scale=d**-0.5)
        out[:, h : h + heads, i:end] = o  # type: ignore[assignment]  # without return_lse a tensor
    return out.view(B, H, Nq, d)


def exact_of(cell: Cell, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a cell computes, in float64: its output, or the gradients of q, k and v."""
    if cell.backward:
        return backward.exact(tensors, cell.causal)
    return (exact_output(tensors, cell.causal, cell.rules),)


def verify(
    cell: Cell, tensors: Sequence[Tensor], exact: Sequence[Tensor], allocated: Allocated = allocated
) -> tuple[Result, Call | None]:
    """Compare a cell with exact_of(); also return the call to time, or None.

    allocated: gives a call's output, and the bytes that were allocated for it.
    """
    result = Result(cell)
    with skipping(result):
        if cell.contender in PARTS and cell.device == "cpu":
            machine.check_memory("its matrices", scratch(cell.contender, cell.case(), cell.simd))
        call = prepared(cell, *tensors)
        result = compared(cell, *allocated(call), exact)
    return result, call if result.status == "ok" else None


def compared(cell: Cell, found: Any, memory: int, exact: Sequence[Tensor]) -> Result:
    """The result, 'ok' or 'wrong', for what was computed and the bytes that were allocated for it.

    The largest error of all gradients is compared with the largest number in any.
    """
    outs, errors = found if cell.backward else (found,), []
    for out, right in zip(outs, exact):
        error = (out - right).abs().nan_to_num(nan=torch.inf)  # (B, H, Nq, d)
        worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        note = f"at {worst}: expected {float(right[worst]):.6g}, got {float(out[worst]):.6g}"
        errors.append((float(error[worst]), worst, note))
    largest, worst, note = max(errors)
    result = Result(cell, error=largest, error_at=worst)
    if not contenders()[cell.contender].own_allocator and cell.device != "webgpu":
        result.scratch = max(0, memory - sum(out.nbytes for out in outs))
    if not largest <= WRONG_ERROR[Dtype(cell.dtype)] * max(float(right.abs().max()) for right in exact):
        result.status, result.note = "wrong", note
    return result


def traffic(cell: Cell, cache: int) -> float | None:
    """Bytes that come into a cache of `cache` bytes in one call; None if they are not counted."""
    if cell.contender not in PARTS or cell.dtype != Dtype.FP32 or cell.rules or cell.backward:
        return None
    counted = streams(cell.contender, cell.case(), block_of(cell.simd))
    return None if counted is None else total(counted, cache)
