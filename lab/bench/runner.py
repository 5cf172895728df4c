"""gpt.py bench: attention timed over a sweep of sizes, contenders in turn, each result verified first.

The cells of one size share their inputs and one float64 result. Those with the same number of threads are
timed in turn, round by round (lab.timing), so that disturbances affect all of them. The rounds are spread
over passes through the whole sweep: other programs slow a machine for seconds at a time, and within a pass a
matrix has the same pages of memory in every round. Further passes time the cells whose medians are not firm,
or with too few quiet rounds; an interval's confidence is slightly lower than stated for that.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext import PARTS, extension, processor, reference
from shakespeare.attention_ext.checks import first_line
from shakespeare.attention_ext.layout import shares
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab import freed_memory, machine, rule_options
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.contenders import Call, contenders, prepared
from shakespeare.lab.bench.plan import check_memory
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.correctness import allocated, exact_gradients
from shakespeare.lab.scratch import block_of, scratch
from shakespeare.lab.timing import Clock, Cpu, Timer, rounds
from shakespeare.lab.traffic import streams
from shakespeare.lab.traffic import traffic as total

# Largest error over the largest expected value. bfloat16 rounds by up to 0.4 %, float16 by 0.05 %.
WRONG_ERROR = {Dtype.FP32: 1e-4, Dtype.BF16: 1e-2, Dtype.FP16: 2e-3}
SLICE = 2**24  # float64 scores that exact_output() holds at once
BUFFER_CACHES = 4  # a sample of the bandwidth reads this many times the size of the core's last own cache
FURTHER_SHARE = 0.25  # share of the time so far that further passes may take

Allocated = Callable[[Call], tuple[Any, int]]
Verified = tuple[Result, float]  # a correct result with the seconds of a call


class Bench:
    """A sweep on the CPU that can be stopped: `done` holds the results of run().

    again: whether run() is in further passes. Raises ValueError for cells that do not fit the memory, or
    the `available` bytes.
    """

    passes = 5  # through the sweep
    further_passes = 8  # at most, through the cells that are not firm
    device: Any = "cpu"
    clock = Clock()
    allocated: Allocated = staticmethod(allocated)

    def __init__(
        self,
        cells: Sequence[Cell],
        rounds: int,
        min_time: float,
        available: int | None = None,
    ) -> None:
        check_memory(cells, available)
        self.cells = list(cells)
        core = processor.caches()[:2][-1]  # the second level belongs to one core nearly everywhere
        self.done = Run(machine.describe(), rounds, min_time, core.size)
        self.again = False

    def run(self) -> Generator[Cell, None, None]:
        """Measure; yield each cell when it is verified and after each round. Ctrl-C keeps complete rounds."""
        before = torch.get_num_threads()
        freed_memory.keep_freed_memory()
        try:
            with torch.inference_mode(not any(cell.backward for cell in self.cells)):
                self._measure_limits()
                yield from self._run()
        finally:
            torch.set_num_threads(before)
            if self.done.complete:
                self.done.busy = self._busy()

    def _measure_limits(self) -> None:
        """Measure the limits of the run, and begin to observe the machine."""
        simds = dict.fromkeys(cell.simd for cell in self.cells if cell.simd)
        names = [extension.load(simd).simd_name() for simd in simds or ("auto",)]
        self.done.machine["simd_name"] = "; ".join(names)
        for threads in dict.fromkeys(cell.threads for cell in self.cells):
            torch.set_num_threads(threads)
            self.done.peaks[threads] = machine.fma_peak(threads=threads)
            self.done.bandwidths[threads] = machine.read_bandwidth(BUFFER_CACHES * self.done.cache, threads)
            products = machine.amx_peak(threads) if any(c.dtype == Dtype.BF16 for c in self.cells) else 0
            if products:
                self.done.amx_peaks[threads] = products
        self.clock = Cpu(BUFFER_CACHES * self.done.cache)  # after compilers

    def _busy(self) -> str | None:
        """The reason why the figures are not firm."""
        assert isinstance(self.clock, Cpu)
        threads = max(self.done.peaks)
        peaks = [self.done.peaks[threads], machine.fma_peak(threads=threads)]
        return machine.busy(self.clock.load, peaks, threads)

    def _rounds_by_pass(self) -> list[int]:
        """The rounds of each pass, at least one."""
        return shares(self.done.rounds, min(self.done.rounds, self.passes))

    def _run(self) -> Iterator[Cell]:
        began = time.perf_counter()
        first, *later = self._rounds_by_pass()
        right = list[list[Verified]]()
        for _, case in itertools.groupby(self.cells, key=lambda cell: cell.inputs):
            verified = yield from self._verify(list(case))
            for _, alike in itertools.groupby(verified, key=lambda timed: timed[0].cell.threads):
                right.append(list(alike))
                yield from self._time(right[-1], first)
        for count in later:
            freed_memory.return_freed_memory()
            for group in right:
                yield from self._time(group, count)
        self.done.complete = True
        yield from self._time_again(right, FURTHER_SHARE * (time.perf_counter() - began))

    def _verify(self, case: list[Cell]) -> Generator[Cell, None, list[Verified]]:
        """Add the results of a case; return the correct ones with the seconds of a call."""
        tensors = inputs(case[0], self.device)
        exact = exact_of(case[0], tensors)
        right = list[Verified]()
        known: dict[Cell, Verified] = {}  # for both states of L2
        for cell in case:
            alike = replace(cell, l2=None)
            if alike in known:
                first, once = known[alike]
                result = replace(first, cell=cell, seconds=[], every=[], paces=[])
                self._count(result)
                right.append((result, once))
                self.done.results.append(result)
                yield cell
                continue
            if cell.device == "cpu":
                torch.set_num_threads(cell.threads)
            result, call = verify(cell, tensors, exact, self.allocated)
            self.done.results.append(result)
            with skipping(result):
                if call:
                    self._count(result)
                    known[alike] = result, self.clock.time(call, 1)[0]
                    right.append(known[alike])
            yield cell
        return right

    def _count(self, result: Result) -> None:
        """Count the bytes of a call."""
        result.traffic = traffic(result.cell, self.done.cache)

    def _time_again(self, groups: list[list[Verified]], seconds: float) -> Iterator[Cell]:
        """Time the cells that are not firm in further passes, for `seconds`, few threads first."""
        end = time.perf_counter() + seconds
        self.again = True
        count = self._rounds_by_pass()[0]
        min_seconds = self.done.min_time / self.done.rounds
        groups.sort(key=lambda group: group[0][0].cell.threads)
        for _, alike in itertools.groupby(groups, key=lambda group: group[0][0].cell.threads):
            left = list(alike)
            for _ in range(self.further_passes):
                loose = ([timed for timed in group if not timed[0].firm] for group in left)
                left = [group for group in loose if group]
                if not left:
                    break
                freed_memory.return_freed_memory()
                for group in left:
                    will_take = (count + 1) * sum(max(once, min_seconds) for _, once in group)
                    if time.perf_counter() + will_take < end:
                        yield from self._time(group, count)

    def _time(self, group: list[Verified], count: int) -> Iterator[Cell]:
        """Time the results of _verify() for `count` rounds on new inputs."""
        cell = group[0][0].cell
        timers = list[Timer]()
        min_seconds = self.done.min_time / self.done.rounds
        if cell.device == "cpu":
            torch.set_num_threads(cell.threads)
        tensors = inputs(cell, self.device)
        calls: dict[Cell, Call] = {}  # one for both states of L2: it may hold much memory
        for result, once in group:
            with skipping(result):
                alike = replace(result.cell, l2=None)
                if alike not in calls:
                    calls[alike] = prepared(result.cell, *tensors)
                cold = result.cell.l2 == "cold"
                timers.append(
                    Timer(calls[alike], self.clock, min_seconds, samples=result, once=once, cold=cold)
                )
        for timer in rounds(timers, count, skipping):
            assert isinstance(timer.samples, Result)
            yield timer.samples.cell


@contextmanager
def skipping(result: Result) -> Iterator[None]:
    """Skip a contender that raises an error, with the reason."""
    try:
        yield
    except Exception as error:  # packages raise types of their own
        full = "needs more memory than the GPU has free"
        result.note = full if isinstance(error, torch.OutOfMemoryError) else first_line(error)
        result.status = "skipped"
        result.cut(0)


def inputs(cell: Cell, device: torch.device | str = "cpu") -> list[Tensor]:
    """q (B, H, Nq, d), k and v (B, H, N, d), and for gradients dout: random, the same for all of a group."""
    generator = torch.Generator(device).manual_seed(0)
    torch_dtype = Dtype(cell.dtype).torch_dtype
    rows = (cell.queries, cell.N, cell.N, cell.queries)[: 3 + cell.backward]
    shapes = ((cell.batch, cell.heads, n, cell.d) for n in rows)
    return [torch.randn(shape, generator=generator, device=device).to(torch_dtype) for shape in shapes]


def exact_output(tensors: Sequence[Tensor], causal: bool) -> Tensor:
    """The output (B, H, Nq, d) in float64, in slices of heads and queries whose scores fit the memory."""
    B, H, Nq, d = tensors[0].shape
    Nk = tensors[1].shape[2]
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
    if cell.rules:
        return rule_options.exact(tensors, cell.rules, cell.causal)
    if cell.backward:
        return exact_gradients(tensors, cell.causal)
    return (exact_output(tensors, cell.causal),)


def verify(
    cell: Cell, tensors: Sequence[Tensor], exact: Sequence[Tensor], allocated: Allocated
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
    outs = found if cell.backward else (found,)
    errors = []
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
        result.status = "wrong"
        result.note = note
    return result


def traffic(cell: Cell, cache: int) -> float | None:
    """Bytes that come into a cache of `cache` bytes in one call; None if they are not counted."""
    if cell.contender not in PARTS or cell.dtype != Dtype.FP32 or cell.rules or cell.backward:
        return None
    counted = streams(cell.contender, cell.case(), block_of(cell.simd))
    return None if counted is None else total(counted, cache)
