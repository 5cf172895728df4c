"""A user's CUDA kernel on the CPU, in the emulator of cuda_on_cpu: a block at a time, a thread as a fiber."""

import ctypes
import math
import re
from functools import partial
from pathlib import Path

import cuda_on_cpu

from shakespeare.own import kernel as kernels


class Emulated(kernels.Native):
    """What kernels.loaded() gives for a file in CUDA here; player.Caller calls it as a kernel in C++."""

    def __init__(self, file: Path, backward: bool = False) -> None:
        self._file, self._text, self._functions = file, file.read_text(), {}
        self._threads, self._br = (
            int(re.search(rf"#define {name} (\d+)", self._text)[1]) for name in ("THREADS", "BR")
        )

    def scratch(self, *sizes: int) -> int:
        return 0

    def _compiled(self, d: int):
        if d not in self._functions:
            work = self._file.parent / f"{self._file.stem}-{d}"
            work.mkdir()
            text = re.sub(r"extern __shared__ float (\w+)\[\]", r"static float \1[1 << 14]", self._text)
            (work / "own.cu").write_text(text.replace("__shared__", "static"))
            macros = {"FORMAT": 0, "HEAD_DIM": d, "THREADS": self._threads, "BLOCKS": 1, "SHARED_BYTES": 1}
            cuda_on_cpu.build(work, "own.cu", macros | {"Work": "Call", "decode": "attention"})
            self._functions[d] = ctypes.CDLL(work / "emulator.so")
        return self._functions[d]

    def prepared(self, given, into, causal, scale, *, threads, scratch, window):
        return partial(self._run, *given.values(), causal, scale, into["out"])

    def _run(self, q, k, v, causal, scale, out):
        B, H, Nq, d = q.shape
        strides = (kernels.Strides(*(n // 4 for n in t.strides[:3])) for t in (q, k, v))
        data = (t.ctypes.data for t in (q, k, v, out))
        sizes = (B, H, Nq, k.shape[2], causal, scale * math.log2(math.e))
        call, library = kernels.CudaCall(*data, None, *strides, *sizes), self._compiled(d)
        for block in range(B * H * -(-Nq // self._br)):
            library.begin_at(block)
            if library.run(ctypes.byref(call), 1, block):
                raise RuntimeError("the threads wait for each other forever")
