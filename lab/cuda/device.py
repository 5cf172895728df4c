"""The GPU that a measurement runs on: its description, its limits, its memory, and how a call on it is timed.

A time is that between two CUDA events, before and after a call. The GPU pauses until the host has launched
some calls, which takes longer than short kernels run, and then runs them without a gap.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import Kernel
from shakespeare.attention_ext.cuda.tiles import Tile
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab.timing import Clock

FLUSH_CACHES = 4  # the buffer that clears the L2 cache has this many times its size
MATMUL_SIDE = 8192
MAX_COPIED = 2**31  # bytes
READING_BLOCKS = 16  # for each multiprocessor
COMPUTING_BLOCKS = 4  # all resident: with more, some multiprocessors would end late
FMA_REPEATS = 5000  # some 5 ms
TIMED = 13  # calls for a limit; the GPU's clock is up after some
MAX_CALLS = 50  # most calls that the host launches ahead
HOST_MARGIN = 1.5  # factor of the pause over the time of launching
LONGEST_PAUSE = 0.05  # seconds

# See csrc/cuda/limits.cu
CHAINS = 16
LINKS = 16
LIMITS_TILE = Tile(1, 1, 256, 0, {"CHAINS": CHAINS, "LINKS": LINKS})
# A row like those of kernels.KERNELS, so that the same code compiles and launches it.
LIMITS = Kernel(
    "limits",
    {Dtype.FP32: "limits.cu"},
    "multiply-adds in registers; reading; a pause",
    "",
    lambda d, dtype, queries, capability: iter([LIMITS_TILE]),
    functions=("fma_chains", "read_all", "pause"),
)


class Gpu(Clock):
    """PyTorch's current CUDA device. Raises BuildError, in one line, without one or a compiler for it."""

    short = 0.0  # time() makes an untimed call itself

    def __init__(self) -> None:
        driver.check_gpu()
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self.device)  # makes the device's context current
        self._on = driver.gpu(self.device.index)
        self.l2 = self._on.l2  # bytes
        self._limits = driver.load(LIMITS, LIMITS_TILE, 1, Dtype.FP32, self.device.index)
        self._flush: tuple[Tensor, Tensor] | None = None

    def describe(self) -> dict:
        """The GPU's facts above a table of figures, besides machine.describe()."""
        return {
            "name": self._on.name,
            "capability": ".".join(map(str, self._on.capability)),
            "multiprocessors": self._on.multiprocessors,
            "memory": self._on.memory,
            "l2": self.l2,
            "cuda": torch.version.cuda,
        }

    def free(self) -> int:
        """Bytes that can still be allocated."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def allocated(self, function: Callable[[], Tensor]) -> tuple[Tensor, int]:
        """The result of `function`, and the most bytes that PyTorch's allocator allocated at once for it."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        out = function()
        torch.cuda.synchronize()
        return out, torch.cuda.max_memory_allocated(self.device) - before

    def time(self, call: Callable[[], Any], count: int, cold: bool = False) -> list[float]:
        """Seconds of each of `count` calls, after one that shows how long the host launches it."""
        seconds = list[float]()
        while left := min(MAX_CALLS, count - len(seconds)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            launching = time.perf_counter() - start
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(left)]
            self.pause(min(LONGEST_PAUSE, HOST_MARGIN * left * launching))
            for begin, end in events:
                if cold:
                    self.clear_cache()
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize()
            seconds += [1e-3 * begin.elapsed_time(end) for begin, end in events]
        return seconds

    def pause(self, seconds: float) -> None:
        """Let the stream, but not the host, wait for `seconds`."""
        self._launch("pause", 1, ctypes.c_ulonglong(int(1e9 * seconds)))

    def clear_cache(self) -> None:
        """Fill the L2 cache: a buffer is written, and another read, so that lines are written back."""
        if self._flush is None:
            numbers = FLUSH_CACHES * self.l2 // 4
            self._flush = torch.zeros(numbers, device=self.device), torch.zeros(numbers, device=self.device)
        written, read = self._flush
        written.zero_()
        self._read(read)

    def fma_peak(self) -> float:
        """The highest number of float32 operations per second, by chains in registers."""
        blocks = self._on.multiprocessors * COMPUTING_BLOCKS
        never = torch.zeros(1, device=self.device)

        def chains() -> None:
            pointer = ctypes.c_void_p(never.data_ptr())
            repeats = ctypes.c_int(FMA_REPEATS)
            self._launch("fma_chains", blocks, pointer, repeats, ctypes.c_float(0.5), ctypes.c_float(1))

        return 2 * CHAINS * LINKS * FMA_REPEATS * blocks * LIMITS_TILE.threads / self._best(chains)

    def tensor_peak(self, dtype: Dtype) -> float:
        """Floating-point operations per second of PyTorch's product of two large random matrices."""
        torch_dtype = dtype.torch_dtype
        a, b = (torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=self.device).to(torch_dtype) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * MATMUL_SIDE**3 / self._best(lambda: torch.mm(a, b, out=out))

    def bandwidths(self) -> dict[str, float]:
        """Bytes per second of the memory: read by a kernel, and read and written by a copy."""
        size = min(MAX_COPIED, self.free() // 4)
        a, b = (torch.zeros(size // 4, device=self.device) for _ in range(2))
        size = 4 * a.numel()
        read = self._best(lambda: self._read(a))
        copy = self._best(lambda: b.copy_(a))
        return {"read": size / read, "copied": 2 * size / copy}

    def reading(self, size: float, cold: bool) -> float:
        """Seconds of a launch that only reads `size` bytes, timed like a call."""
        numbers = torch.zeros(max(1, int(size) // 4), device=self.device)
        return statistics.median(self.time(lambda: self._read(numbers), TIMED, cold))

    def _read(self, numbers: Tensor) -> None:
        blocks = self._on.multiprocessors * READING_BLOCKS
        data = ctypes.c_void_p(numbers.data_ptr())
        # Zeros never add up to -1, so that nothing is written.
        self._launch("read_all", blocks, data, ctypes.c_longlong(numbers.numel() // 4), data)

    def _launch(self, name: str, blocks: int, *arguments: Any) -> None:
        driver.launch(self._limits.functions[name], blocks, LIMITS_TILE.threads, *arguments)

    def _best(self, call: Callable[[], object]) -> float:
        """The seconds of a call, the least of several."""
        return min(self.time(call, TIMED))
