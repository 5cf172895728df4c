"""What the tests of the Numba kernels run in a process of its own, where Numba simulates CUDA.

Numba reads NUMBA_ENABLE_CUDASIM when it is imported. Tensors come and go as NumPy's arrays.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from typing import Any

import torch


def simulate() -> None:
    """Let Numba, not imported yet, simulate CUDA in this process."""
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    sys.setswitchinterval(1e-4)  # seconds; the simulator polls its threads, and keeps them from running


def flash_attention(arrays: Any, options: dict[str, Any]) -> Any:
    """numba_flash.flash_attention(*arrays, **options)."""
    from attention_ext.cuda import numba_flash

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # NumPy warns of inf - inf and of what overflows; a GPU does not
        warnings.simplefilter("ignore", RuntimeWarning)
        results = numba_flash.flash_attention(*map(torch.from_numpy, arrays), **options)
        return [t.numpy() for t in results]


def traffic(arrays: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a call reads and writes in global memory: as simulated, and by the kernel's own loops."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    from attention_ext.cuda import numba_flash

    numbers = itertools.count()  # next() is atomic
    read, write = FakeCUDAArray.__getitem__, FakeCUDAArray.__setitem__

    def counted_read(array, index):
        item = read(array, index)
        if not isinstance(item, FakeCUDAArray):  # a slice moves nothing
            next(numbers)
        return item

    def counted_write(array, index, value):
        next(numbers)
        write(array, index, value)

    FakeCUDAArray.__getitem__, FakeCUDAArray.__setitem__ = counted_read, counted_write
    try:
        numba_flash.flash_attention(*map(torch.from_numpy, arrays), **options)
    finally:
        FakeCUDAArray.__getitem__, FakeCUDAArray.__setitem__ = read, write
    (B, H, Nq, d), Nk = arrays[0].shape, arrays[1].shape[2]
    br, bc, parts = options["br"], options["bc"], -(-d // numba_flash.WIDTH)
    counted = Nq * (2 * d + 1)  # Q, O and the logsumexp
    for i0 in range(0, Nq, br):
        keys = min(Nk, i0 + br + Nk - Nq) if options["causal"] else Nk
        counted += 2 * keys * d  # K and V
        if options["state"] == "spilled":  # every tile writes the state, and all but the first read it
            state = br * parts * (-(-d // (4 * parts)) * 4 + 2)
            counted += (2 * -(-keys // bc) - 1) * state
    return 4 * next(numbers), 4 * B * H * counted


def ptx(d: int, state: str) -> str:
    """The kernel's PTX for compute capability 9.0. No GPU is needed, but NVVM; not in the simulator."""
    from numba import cuda, float32, types

    from attention_ext.cuda import numba_flash

    array = {n: types.Array(float32, n, "C") for n in (1, 2, 3)}
    arguments = (*4 * (array[3],), array[2], array[1], types.boolean, float32)
    kernel = numba_flash.kernel(d, *numba_flash.tile(d), state == "spilled")
    return cuda.compile_ptx(kernel.py_func, arguments, cc=(9, 0))[0]
