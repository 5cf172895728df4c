"""gpt.py bench --device cuda or webgpu: attention on a GPU over a sweep of sizes.

The GPU is the clock of lab.timing. A contender that refuses a case is skipped, with its reason.

Sequential C++, part1 on one core of the CPU, is the baseline of the homework's chart. A GPU's case would take
minutes there. So fewer heads are timed, or one head at a shorter length, and the time is scaled by the work.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.results import Result
from shakespeare.lab.bench.runner import Bench, Verified, skipping
from shakespeare.lab.cuda.device import Gpu
from shakespeare.lab.formats import counted

SEQUENTIAL_FLOPS = 6e9  # most operations of a call, some two seconds
SEQUENTIAL_CALLS = 3
CHANGED_PEAK = 0.05  # change between the beginning and the end above which figures are not firm


class GpuBench(Bench):
    """A sweep on a GPU.

    against_cpu: also time sequential C++. gpu: the GPU that measures, also lab.webgpu.device's. Raises
    BuildError without a GPU or a compiler for it, ValueError for cells that do not fit its memory.
    """

    passes = 1  # others compile for each
    further_passes = 0

    def __init__(
        self, cells: Sequence[Cell], rounds: int, min_time: float, against_cpu: bool = False, gpu: Any = None
    ) -> None:
        self.clock: Any = gpu or Gpu()
        self.device = self.clock.device
        self.allocated = self.clock.allocated
        super().__init__(cells, rounds, min_time, self.clock.free())
        self.done.machine["gpu"] = self.clock.describe()
        self.done.cache = self.clock.l2
        self.against_cpu = against_cpu

    def _measure_limits(self) -> None:
        self.done.peaks[1] = self.clock.fma_peak()
        bandwidths = self.clock.bandwidths()
        self.done.machine["gpu"]["bandwidths"] = bandwidths
        self.done.bandwidths[1] = max(bandwidths.values())
        for dtype in dict.fromkeys(cell.dtype for cell in self.cells):
            if dtype != Dtype.FP32 and self.cells[0].device == "cuda":
                self.done.tensor_peaks[dtype] = self.clock.tensor_peak(Dtype(dtype))

    def _busy(self) -> str | None:
        before = self.done.peaks[1]
        after = self.clock.fma_peak()
        if abs(after / before - 1) <= CHANGED_PEAK:
            return None
        what = f"its FMA peak went from {before / 1e12:.3g} to {after / 1e12:.3g} TFLOP/s"
        return f"The GPU's speed changed: {what}; these figures are not firm."

    def _verify(self, case: list[Cell]) -> Generator[Cell, None, list[Verified]]:
        small = smaller(case[0])
        if self.against_cpu and all(result.cell != small for result in self.done.sequential):
            self.done.sequential.append(time_sequential(small))
        return (yield from super()._verify(case))

    def _count(self, result: Result) -> None:
        """Count the bytes of q, k, v and the output, if moving them takes longer than the arithmetic."""
        cell = result.cell
        traffic = cell.least_traffic
        if traffic / self.done.bandwidths[1] > cell.flops / self.done.peak(cell):
            result.traffic = traffic
            alike = (r for r in self.done.results if (r.cell.inputs, r.cell.l2) == (cell.inputs, cell.l2))
            known = next((r.reading for r in alike if r.reading), None)
            result.reading = known or self.clock.reading(traffic, cell.l2 == "cold")


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
    """The result of a smaller() cell; it is skipped if it cannot be compiled."""
    result = Result(small)
    with skipping(result):
        bench = Bench([small], SEQUENTIAL_CALLS, 0.0)
        list(bench.run())
        (result,) = bench.done.results
    return result


def sequential_text(result: Result) -> str:
    """One line on the timed case; times for larger cells are scaled by work."""
    cell = result.cell
    case = f"N {cell.N}, d {cell.d}, {counted(cell.heads, 'head')}{', causal' if cell.causal else ''}"
    if result.median is None:
        return f"sequential C++ ({case}): {result.status}: {result.note}"
    return f"sequential C++ (part1, one core of the CPU, {case}): {result.median:.3g} s; scaled by work"
