"""gpt.py bench --device cuda: attention on a GPU over a sweep of sizes, each result verified first.

All cells of a case share their inputs and one float64 result. They are timed in turn, round by round, so that
a change of the GPU's clock affects all of them. lab.cuda.gpu times a call. A round records its median call. A
contender that refuses a case is skipped, with its reason.

Sequential C++, part1 on one core of the CPU, is the baseline of the homework's chart. A GPU's case would take
minutes there. So fewer heads are timed, or one head at a shorter length, and the time is scaled by the work.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab import machine
from shakespeare.lab.bench.cases import check_memory
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.contenders import Call
from shakespeare.lab.bench.measure import exact_of, in_rounds, inputs, skipping, verify
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.cuda.gpu import Gpu
from shakespeare.lab.text import counted
from shakespeare.lab.timing import seconds_of

MOST_CALLS = 50  # most calls that the host launches ahead
SHORT_CALL_SECONDS = 0.005  # before shorter calls, an untimed one restores the caches
SEQUENTIAL_FLOPS, SEQUENTIAL_CALLS = 6e9, 3  # most operations of a call, some two seconds; timed calls
CHANGED_PEAK = 0.05  # change between the beginning and the end above which figures are not firm

# A contender's result, and its call with the seconds of one and those in which the host launches it, or None.
Verified = tuple[Result, tuple[Call, float, float] | None]


class GpuBench:
    """A sweep that can be stopped, like measure.Bench: `done` holds the results of run().

    against_cpu: also time sequential C++. gpu: the GPU that measures, also lab.webgpu.gpu's. Raises
    BuildError without a GPU or a compiler for it, ValueError for cells that do not fit its memory.
    """

    again = False  # there are no further passes

    def __init__(
        self, cells: Sequence[Cell], rounds: int, min_time: float, against_cpu: bool = False, gpu: Any = None
    ) -> None:
        self.gpu: Any = gpu or Gpu()
        check_memory(cells, self.gpu.free())
        self.cells = list(cells)
        self.done = Run(machine.describe() | {"gpu": self.gpu.describe()}, rounds, min_time, self.gpu.l2)
        self.against_cpu = against_cpu

    def run(self) -> Generator[Cell, None, None]:
        """Measure; yield each cell when it is verified and after each round. Ctrl-C keeps complete rounds."""
        with torch.inference_mode(not self.cells[0].backward):
            self._measure_limits()
            for _, case in itertools.groupby(self.cells, key=lambda cell: cell.inputs):
                yield from self._case(list(case))
            self.done.complete = True
            before, after = self.done.peaks[1], self.gpu.fma_peak()
            if abs(after / before - 1) > CHANGED_PEAK:
                what = f"its FMA peak went from {before / 1e12:.3g} to {after / 1e12:.3g} TFLOP/s"
                self.done.busy = f"The GPU's speed changed: {what}; these figures are not firm."

    def _measure_limits(self) -> None:
        self.done.peaks[1] = self.gpu.fma_peak()
        bandwidths = self.gpu.bandwidths()
        self.done.machine["gpu"]["bandwidths"] = bandwidths
        self.done.bandwidths[1] = max(bandwidths.values())
        for dtype in dict.fromkeys(cell.dtype for cell in self.cells):
            if dtype != Dtype.FP32 and self.cells[0].device == "cuda":
                self.done.tensor_peaks[dtype] = self.gpu.tensor_peak(Dtype(dtype))

    def _case(self, cells: list[Cell]) -> Iterator[Cell]:
        """Verify the contenders of a case and time the correct ones."""
        if self.against_cpu:
            small = smaller(cells[0])
            if all(result.cell != small for result in self.done.sequential):
                self.done.sequential.append(time_sequential(small))
        tensors = inputs(cells[0], self.gpu.device)
        exact = exact_of(cells[0], tensors)
        verified: dict[str, Verified] = {}
        readings: dict[str | None, float] = {}  # by the cell's L2
        running: list[tuple[Result, Callable[[], None]]] = []
        for cell in cells:
            if cell.contender not in verified:
                verified[cell.contender] = self._verify(cell, tensors, exact)
            of_contender, timed = verified[cell.contender]
            result = replace(of_contender, cell=cell, seconds=[], paces=[])
            self.done.results.append(result)
            if timed:
                if cell.least_traffic / self.done.bandwidths[1] > cell.flops / self.done.peak(cell):
                    result.traffic = cell.least_traffic
                    if cell.l2 not in readings:
                        readings[cell.l2] = self.gpu.reading(cell.least_traffic, cell.l2 == "cold")
                    result.reading = readings[cell.l2]
                running.append((result, partial(self._round, result, *timed)))
            yield cell
        del exact  # its memory is free again
        yield from in_rounds(running, self.done.rounds)

    def _verify(self, cell: Cell, tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> Verified:
        result, call = verify(cell, tensors, exact, self.gpu.allocated)
        with skipping(result):
            return result, (call, *self.gpu.once(call)) if call else None
        return result, None

    def _round(self, result: Result, call: Call, once: float, launching: float) -> None:
        """Add a round to a result: the median of its calls."""
        seconds, cold = list[float](), result.cell.l2 == "cold"
        repeats = max(1, math.ceil(self.done.min_time / self.done.rounds / once))
        while len(seconds) < repeats:
            if not cold and once < SHORT_CALL_SECONDS:
                call()
            seconds += self.gpu.time(call, min(MOST_CALLS, repeats - len(seconds)), cold, launching)
        result.seconds.append(statistics.median(seconds))
        result.paces.append(1.0)


def smaller(cell: Cell) -> Cell:
    """The cell that is timed on the CPU in place of one on a GPU: float32, few enough operations."""
    heads = cell.batch * cell.heads
    small = replace(cell, contender="part1", simd="auto", device="cpu", l2=None)
    small = replace(small, batch=1, heads=1, dtype=Dtype.FP32.value)
    while small.flops > SEQUENTIAL_FLOPS and small.N > 1:
        small = replace(small, N=small.N // 2, queries=max(1, small.queries // 2))
    if small.N < cell.N:
        return small
    return replace(small, heads=max(1, min(heads, int(SEQUENTIAL_FLOPS / small.flops))))


def sequential_seconds(cell: Cell, results: Sequence[Result]) -> float | None:
    """The time of sequential C++ for a cell, scaled by work; None if `results` lack it."""
    small = smaller(cell)
    for result in results:
        if result.cell == small and result.median is not None:
            return result.median * cell.flops / small.flops
    return None


def time_sequential(small: Cell) -> Result:
    """Verify and time a smaller() cell on one thread; it is skipped if it cannot be compiled."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors = inputs(small)
        result, call = verify(small, tensors, exact_of(small, tensors))
        if call:
            result.seconds = [seconds_of(call) for _ in range(SEQUENTIAL_CALLS)]
            result.paces = [1.0] * SEQUENTIAL_CALLS
        return result
    finally:
        torch.set_num_threads(before)


def sequential_text(result: Result) -> str:
    """One line on the timed case; times for larger cells are scaled by work."""
    cell = result.cell
    case = f"N {cell.N}, d {cell.d}, {counted(cell.heads, 'head')}" + ", causal" * cell.causal
    if result.median is None:
        return f"sequential C++ ({case}): {result.status}: {result.note}"
    return f"sequential C++ (part1, one core of the CPU, {case}): {result.median:.3g} s; scaled by work"
