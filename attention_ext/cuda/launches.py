"""How the functions of the CUDA kernels are launched for a call: once, or as kernels 1, 6 and split need it.

Nothing here waits for the GPU, and all memory comes from PyTorch's allocator, so a CUDA graph can capture a
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from attention_ext.cuda.driver import Compiled

EARLY_LAUNCH = (9, 0)  # the least compute capability
MOST_WAVES, WAVE_COST = 8, 0.02  # of blocks, by which splits() chooses


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_longlong) for name in ("batch", "head", "row")]


class Call(ctypes.Structure):
    """struct Call of csrc/cuda/call.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((f"{name}_strides", Strides) for name in "qkv"),
        *((name, ctypes.c_int) for name in ("batches", "heads", "Nq", "Nk", "causal")),
        ("scale", ctypes.c_float),
    ]


Launch = Callable[["Compiled", Call, "Tensor", "Tensor", "Tensor"], None]


def once(kernel: Compiled, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A block for each tile of queries of each head."""
    kernel.launch(kernel.row.functions[0], _tiles(kernel, call), call)


def _tiles(kernel: Compiled, call: Call) -> int:
    return call.batches * call.heads * -(-call.Nq // kernel.tile.br)


def for_each_tile_of_keys(kernel: Compiled, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Kernel 1: as many launches as tiles of keys, with the state of all rows in global memory."""
    import torch

    m, l, o = (q.new_empty(size, dtype=torch.float32) for size in (q.shape[:3], q.shape[:3], q.shape))
    state = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in (m, l, o)))
    for first_key in range(0, call.Nk, kernel.tile.bc):
        kernel.launch(kernel.row.functions[0], _tiles(kernel, call), call, state, ctypes.c_int(first_key))


def resident(kernel: Compiled, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Kernel 6: at most a block for each multiprocessor, which takes one tile after the other."""
    from attention_ext.cuda.driver import tensor_map

    tile, box = kernel.tile, kernel.tile.sizes["BOX"]
    maps = tensor_map(q, tile.br, box), tensor_map(k, tile.bc, box), tensor_map(v, tile.bc, box)
    blocks = min(_tiles(kernel, call), kernel.on.multiprocessors)
    kernel.launch(kernel.row.functions[0], blocks, *maps, call)


def split(kernel: Compiled, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Few queries: a block for each split of the keys, then one for each row, which merges the results."""
    import torch

    attend, merge = kernel.row.functions
    rows, sizes = _tiles(kernel, call), kernel.tile.sizes
    count = splits(rows, call.Nk, kernel.tile.bc, kernel.on.multiprocessors * sizes["BLOCKS"])
    B, H, Nq, d = q.shape
    partial = q.new_empty(B * H * Nq * count * (d + 2), dtype=torch.float32)
    arguments = call, ctypes.c_void_p(partial.data_ptr()), ctypes.c_int(count)
    kernel.launch(attend, rows * count, *arguments)
    early = kernel.on.capability >= EARLY_LAUNCH
    kernel.launch(merge, B * H * Nq, *arguments, threads=sizes["MERGE_THREADS"], early=early)


def splits(rows: int, keys: int, together: int, slots: int) -> int:
    """Into how many splits the keys are cut, so that all of the GPU has work.

    rows: blocks for one split. together: keys that a block takes at a time. slots: blocks that run at once.
    More waves of blocks fill the last one better, and cost more merging.
    """
    most = max(1, keys // together)
    best, chosen = -1.0, 1
    for waves in range(1, MOST_WAVES + 1):
        count = min(most, max(1, waves * slots // rows))
        used = rows * count / (-(-rows * count // slots) * slots) - WAVE_COST * waves
        if used > best + 1e-9:
            best, chosen = used, count
    return chosen
