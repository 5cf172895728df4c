"""gpt.py bench --device cuda: attention on a GPU over a sweep of sizes, each result verified first.

All cells of a case share their inputs and one float64 result. They are timed in turn, round by round, so that
a change of the GPU's clock affects all of them. lab.cuda.gpu times a call. A round records its median call. A
contender that refuses a case is skipped, with its reason.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_ext import BuildError
from attention_ext.parts import Dtype
from lab import machine
from lab.bench import sequential
from lab.bench.cases import Cell, check_memory
from lab.bench.contenders import Call, contenders
from lab.bench.measure import MIN_TIME_SECONDS, ROUNDS, Spent, compared, exact_output, inputs, whole_rounds
from lab.bench.results import Result, Run
from lab.cuda.gpu import Gpu

MOST_CALLS = 50  # most calls that the host launches ahead
SHORT_CALL_SECONDS = 0.005  # before shorter calls, an untimed one restores the caches
CHANGED_PEAK = 0.05  # change between the beginning and the end above which figures are not firm


@dataclass
class Verified:
    """A contender at a case. call: the function to time, or None.

    once, launching: seconds of a call, and seconds in which the host launches it.
    """

    result: Result
    call: Call | None = None
    once: float = 0.0
    launching: float = 0.0


class GpuBench:
    """A sweep that can be stopped, like measure.Bench: `done` holds the results of run().

    against_cpu: also time sequential C++ for each case. gpu: the GPU that measures.
    Raises BuildError without a GPU or a compiler for it, and ValueError for cells that do not fit its memory.
    """

    again = False  # there are no further passes

    def __init__(
        self,
        cells: Sequence[Cell],
        rounds: int = ROUNDS,
        min_time: float = MIN_TIME_SECONDS,
        *,
        against_cpu: bool = False,
        gpu: Gpu | None = None,
    ) -> None:
        self.gpu = gpu or Gpu()
        check_memory(cells, self.gpu.free())
        self.cells = list(cells)
        about = machine.describe() | {"gpu": self.gpu.describe()}
        self.done = Run(about, rounds, min_time, self.gpu.l2)
        self.against_cpu = against_cpu

    def run(self) -> Spent:
        """Measure; yield each cell with the seconds that were just spent on it.

        A KeyboardInterrupt stops it. The rounds that all cells of a case have completed are kept.
        """
        with torch.inference_mode():
            self._measure_limits()
            for _, case in itertools.groupby(self.cells, key=lambda cell: cell.inputs):
                yield from self._case(list(case))
            self.done.complete = True
            before, after = self.done.peaks[1], self.gpu.fma_peak()
            if abs(after / before - 1) > CHANGED_PEAK:
                self.done.busy = (
                    f"The GPU's speed changed: its FMA peak went from {before / 1e12:.1f} to "
                    f"{after / 1e12:.1f} TFLOP/s; these figures are not firm."
                )

    def _measure_limits(self) -> None:
        self.done.peaks[1] = self.gpu.fma_peak()
        bandwidths = self.gpu.bandwidths()
        self.done.machine["gpu"]["bandwidths"] = bandwidths
        self.done.bandwidths[1] = max(bandwidths.values())
        for dtype in dict.fromkeys(cell.dtype for cell in self.cells):
            if dtype != Dtype.FP32:
                self.done.tensor_peaks[dtype] = self.gpu.tensor_peak(Dtype(dtype))

    def _case(self, cells: list[Cell]) -> Spent:
        """Verify the contenders of a case and time the correct ones."""
        if self.against_cpu:
            small = sequential.smaller(cells[0])
            if all(result.cell != small for result in self.done.sequential):
                self.done.sequential.append(sequential.measure(cells[0]))
        q, k, v = inputs(cells[0], self.gpu.device)
        exact = exact_output(q, k, v, cells[0].causal)
        verified: dict[str, Verified] = {}
        readings: dict[str | None, float] = {}  # by the cell's L2
        running: list[tuple[Result, Verified]] = []
        for cell in cells:
            start = time.perf_counter()
            if cell.contender not in verified:
                verified[cell.contender] = self._verify(cell, q, k, v, exact)
            found = verified[cell.contender]
            result = replace(found.result, cell=cell, seconds=[], paces=[])
            self.done.results.append(result)
            if found.call:
                if cell.least_traffic / self.done.bandwidths[1] > cell.flops / self.done.peak(cell):
                    result.traffic = cell.least_traffic
                    if cell.l2 not in readings:
                        readings[cell.l2] = self.gpu.reading(cell.least_traffic, cell.l2 == "cold")
                    result.reading = readings[cell.l2]
                running.append((result, found))
            yield cell, time.perf_counter() - start
        del exact  # its memory is free again
        with whole_rounds([result for result, _ in running]):
            for _ in range(self.done.rounds):
                for result, found in running:
                    start = time.perf_counter()
                    result.seconds.append(self._time(found, result.cell.l2 == "cold"))
                    result.paces.append(1.0)
                    yield result.cell, time.perf_counter() - start

    def _verify(self, cell: Cell, q: Tensor, k: Tensor, v: Tensor, exact: Tensor) -> Verified:
        try:
            call = contenders()[cell.contender].prepare(cell, q, k, v)
            result = compared(cell, *self.gpu.allocated(call), exact)
        except torch.OutOfMemoryError:
            return Verified(Result(cell, "skipped", "needs more memory than the GPU has free"))
        except (BuildError, ValueError, TypeError) as error:
            return Verified(Result(cell, "skipped", str(error)))
        if result.status != "ok":
            return Verified(result)
        return Verified(result, call, *self.gpu.once(call))

    def _time(self, verified: Verified, cold: bool) -> float:
        """Seconds of the median call of a round."""
        call, seconds = verified.call, list[float]()
        assert call is not None
        repeats = max(1, math.ceil(self.done.min_time / self.done.rounds / verified.once))
        while len(seconds) < repeats:
            if not cold and verified.once < SHORT_CALL_SECONDS:
                call()
            count = min(MOST_CALLS, repeats - len(seconds))
            seconds += self.gpu.time(call, count, cold, verified.launching)
        return statistics.median(seconds)
