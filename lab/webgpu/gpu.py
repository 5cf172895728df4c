"""The GPU that a measurement runs on through WebGPU: its description, its limits, and how a call is timed.

A time is that from the first of several launches until the last one has ended, by the host's clock, over
their number. What the caller copies to and from the GPU is not in it.
"""

import importlib.metadata
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shakespeare.attention_ext.webgpu.calls import Call, arrays_of
from shakespeare.attention_ext.webgpu.gpu import Source, opened

GROUPS = 2048  # workgroups of a measurement of a limit, of 256 invocations
LEAST_SECONDS = 0.02  # of such a measurement
RESTED_SECONDS = 0.05  # after which a GPU may lower its clock
WARM_SECONDS = 0.5  # of work until the clock is up again
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


def slug() -> str:
    """The adapter's name as part of a file's name. Raises BuildError if there is none."""
    return re.sub(r"[^a-z0-9]+", "-", opened().adapter.name.lower()).strip("-")


class Gpu:
    """The process's adapter, for lab.bench.cuda.GpuBench. Raises BuildError if there is none."""

    device = "cpu"  # of the tensors
    l2 = 0  # unknown

    def __init__(self) -> None:
        self.gpu = opened()
        self._busy_until = 0.0
        self._never = self.gpu.buffer(np.array([0, 0, 0, 0, 0.5, 1, 0.001, 0], np.float32))

    def describe(self) -> dict:
        """The adapter's facts above a table of figures, besides machine.describe()."""
        adapter = self.gpu.adapter
        features = " and ".join(sorted(adapter.features)) or "no optional features"
        facts = {"name": adapter.name, "backend": adapter.backend, "kind": adapter.kind}
        return facts | {"features": features, "wgpu": importlib.metadata.version("wgpu")}

    def free(self) -> None:
        """Bytes that can still be allocated: WebGPU does not say."""

    def allocated(self, call: Prepared) -> tuple[Tensor, int]:
        """The result of a call; its memory is unknown."""
        return call(), 0

    def once(self, call: Prepared) -> tuple[float, float]:
        """Seconds of a call, and seconds in which the host launches it."""
        return self.time(call, 1)[0], 0.0

    def time(self, call: Prepared, count: int, cold: bool = False, launching: float = 0.0) -> list[float]:
        """Seconds of each of `count` calls; all have the mean. cold, launching: as in lab.cuda.gpu."""

        def launch(times: int) -> None:
            for _ in range(times):
                call.call.launch()

        call.call.wait()
        self._warm_up(launch)
        return [self._timed(launch, count) / count] * count

    def fma_peak(self) -> float:
        """The highest number of float32 operations per second, by chains in registers."""
        return 2 * self._rate("multiply_adds", 256 * 1024, 1024)

    @cached_property
    def exponentials(self) -> float:
        """Powers of two per second."""
        return self._rate("exponentials", 8 * 1024, 1024)

    @cached_property
    def workgroup_bandwidth(self) -> float:
        """Bytes per second that invocations read from workgroup memory."""
        return self._rate("workgroup_reads", 4 * 16 * 1024, 1024)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a dispatch reads from a storage buffer."""
        size = min(READ, self.gpu.adapter.limits["max-storage-buffer-binding-size"])
        pipeline = self.gpu.pipeline(Source(("limits.wgsl",), (("REPEATS", 1),)), "storage_reads")
        buffers = [self._never, self.gpu.buffer(size)]
        return size / self._seconds(lambda times: self.gpu.run(pipeline, buffers, (GROUPS,), times))

    def bandwidths(self) -> dict[str, float]:
        """Bytes per second of the memory."""
        return {"read": self.bandwidth}

    def reading(self, size: float, cold: bool) -> float:
        """Seconds in which `size` bytes are read."""
        return size / self.bandwidth

    def _rate(self, entry: str, each: int, repeats: int) -> float:
        """Of what an entry point does `each` times for an invocation, how many a second."""
        pipeline = self.gpu.pipeline(Source(("limits.wgsl",), (("REPEATS", repeats),)), entry)
        groups = 8 if self.gpu.adapter.is_cpu else GROUPS
        seconds = self._seconds(lambda times: self.gpu.run(pipeline, [self._never], (groups,), times))
        return each * groups * 256 / seconds

    def _seconds(self, launch: Callable[[int], None]) -> float:
        """The seconds of a launch, the least of several after a warm-up."""
        self._warm_up(launch)
        self._timed(launch, 1)
        times = max(1, round(LEAST_SECONDS / self._timed(launch, 1)))
        return min(self._timed(launch, times) for _ in range(TIMED)) / times

    def _timed(self, launch: Callable[[int], None], times: int) -> float:
        """Seconds of so many launches."""
        start = time.perf_counter()
        launch(times)
        self.gpu.read(self._never, np.float32, 1)
        self._busy_until = time.perf_counter()
        return self._busy_until - start

    def _warm_up(self, launch: Callable[[int], None]) -> None:
        """Launch until the clock is up, if the GPU has rested."""
        begin = time.perf_counter()
        if not self.gpu.adapter.is_cpu and begin - self._busy_until > RESTED_SECONDS:
            while time.perf_counter() - begin < WARM_SECONDS:
                self._timed(launch, 1)
