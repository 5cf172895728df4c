"""The GPU that a measurement runs on through WebGPU: its description, its limits, and how a call is timed.

A time is that from the first of several launches until the last one has ended, by the host's clock, over
their number. What the caller copies to and from the GPU is not in it.
"""

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shakespeare.attention_ext.webgpu.calls import Call, arrays_of
from shakespeare.attention_ext.webgpu.driver import Source, opened
from shakespeare.lab.timing import Clock

REPEATS = 1024  # loops of an invocation in a measurement of a limit
GROUPS = 2048  # workgroups of a measurement of a limit, of 256 invocations
MIN_SECONDS = 0.02  # such a measurement takes at least
RESTED_SECONDS = 0.05  # after which a GPU may lower its clock
WARM_SECONDS = 0.5  # a rested GPU works until its clock is up again
TIMED = 5  # measurements of a limit; the fastest counts
READ = 2**28  # bytes, at most


@dataclass(frozen=True)
class Prepared:
    """A call of part4 whose tensors are on the GPU. Calling it computes the output (B, H, Nq, d)."""

    call: Call

    def __call__(self) -> Tensor:
        self.call.launch()
        return torch.from_numpy(self.call.read()[0])


def prepared(q: Tensor, k: Tensor, v: Tensor, causal: bool, step: str | None) -> Prepared:
    """attention(q, k, v, causal=causal, kernel=step), ready to be launched."""
    return Prepared(Call(opened(), arrays_of(q, k, v, causal), causal, q.shape[3] ** -0.5, step))


class Gpu(Clock):
    """The process's adapter, for lab.bench.gpu_bench.GpuBench. Raises BuildError if there is none."""

    device = "cpu"  # where the tensors are
    l2 = 0  # unknown

    def __init__(self) -> None:
        self.gpu = opened()
        self._busy_until = 0.0
        self._never = self.gpu.buffer(np.array([0, 0, 0, 0, 0.5, 1, 0.001, 0], np.float32))

    def describe(self) -> dict:
        """The adapter's facts above a table of figures, besides machine.describe()."""
        adapter = self.gpu.adapter
        return {
            "name": adapter.name,
            "backend": adapter.backend,
            "kind": adapter.kind,
            "features": " and ".join(sorted(adapter.features)) or "no optional features",
            "wgpu": importlib.metadata.version("wgpu"),
        }

    def free(self) -> None:
        """Bytes that can still be allocated: WebGPU does not say."""

    def allocated(self, call: Prepared) -> tuple[Tensor, int]:
        """The result of a call; its memory is unknown."""
        return call(), 0

    def time(self, call: Any, count: int, cold: bool = False) -> list[float]:
        """Seconds of each of `count` launches of a Prepared; all have the mean. cold has no effect."""

        def launch(times: int) -> None:
            for _ in range(times):
                call.call.launch()

        mean = self._mean(launch, count)
        return [mean for _ in range(count)]

    def fma_peak(self) -> float:
        """The highest number of float32 operations per second, by chains in registers."""
        return 2 * self._rate("multiply_adds", 256)

    @cached_property
    def exponentials(self) -> float:
        """Powers of two per second."""
        return self._rate("exponentials", 8)

    @cached_property
    def workgroup_bandwidth(self) -> float:
        """Bytes per second that invocations read from workgroup memory."""
        return self._rate("workgroup_reads", 4 * 16)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a dispatch reads from a storage buffer."""
        size = min(READ, self.gpu.adapter.limits["max-storage-buffer-binding-size"])
        return size / self._seconds("storage_reads", 1, GROUPS, self.gpu.buffer(size))

    def bandwidths(self) -> dict[str, float]:
        """Bytes per second of the memory."""
        return {"read": self.bandwidth}

    def reading(self, size: float, cold: bool) -> float:
        """Seconds in which `size` bytes are read."""
        return size / self.bandwidth

    def _rate(self, entry: str, each: int) -> float:
        """The rate per second of what a loop of an entry point does `each` times for an invocation."""
        groups = 8 if self.gpu.adapter.is_cpu else GROUPS
        return each * REPEATS * groups * 256 / self._seconds(entry, REPEATS, groups)

    def _seconds(self, entry: str, repeats: int, groups: int, *buffers: Any) -> float:
        """The seconds of an entry point of limits.wgsl, the least of several after a warm-up."""
        pipeline = self.gpu.pipeline(Source(("limits.wgsl",), (("REPEATS", repeats),)), entry)
        launch = partial(self.gpu.run, pipeline, [self._never, *buffers], (groups,))
        self._mean(launch, 1)
        times = max(1, round(MIN_SECONDS / self._mean(launch, 1)))
        return min(self._mean(launch, times) for _ in range(TIMED))

    def _mean(self, launch: Callable[[int], None], times: int) -> float:
        """The mean seconds of so many launches, after others if the GPU has rested, until its clock is up."""
        rested = self._wait() - self._busy_until > RESTED_SECONDS and not self.gpu.adapter.is_cpu
        start = time.perf_counter()
        end = start + WARM_SECONDS
        while rested and start < end:
            launch(1)
            start = self._wait()
        launch(times)
        self._busy_until = self._wait()
        return (self._busy_until - start) / times

    def _wait(self) -> float:
        """Wait for all launches; the time then."""
        self.gpu.read(self._never, np.float32, 1)
        return time.perf_counter()
