"""How the functions of the CUDA kernels are launched for a call: once, or as kernels 1, 6 and split need it.

A function here gives the Plan for a call's sizes; csrc/bindings/launcher.cpp keeps it and follows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shakespeare.attention_ext.cuda.gpu import Compiled

EARLY_LAUNCH = (9, 0)  # the least compute capability
MOST_WAVES, WAVE_COST = 8, 0.02  # of blocks, by which splits() chooses


class Launch(ctypes.Structure):
    """struct Launch of csrc/bindings/launcher.cpp."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("blocks", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("x", "y", "shared")),
        ("early", ctypes.c_int32),
    ]


class Plan(ctypes.Structure):
    """struct Plan of csrc/bindings/launcher.cpp.

    A function's arguments are struct Call of csrc/cuda/call.h, the scratch and a number; with a box, the
    tensor maps of q, k and v, then struct Call.
    """

    _fields_ = [
        ("launches", Launch * 2),
        *((name, ctypes.c_int32) for name in ("count", "repeats", "number", "step")),
        ("scratch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "vectors", "br", "bc", "box")),
    ]


Planner = Callable[["Compiled", int, int, int], Plan]


def once(kernel: Compiled, heads: int, Nq: int, Nk: int) -> Plan:
    """A block for each tile of queries of each head; heads: of all batches."""
    return _plan(kernel, _launch(kernel, _tiles(kernel, heads, Nq)))


def for_each_tile_of_keys(kernel: Compiled, heads: int, Nq: int, Nk: int) -> Plan:
    """Kernel 1: as many launches as tiles of keys, with the state of all rows in global memory."""
    bc, d = kernel.tile.bc, kernel.width
    launch = _launch(kernel, _tiles(kernel, heads, Nq))
    return _plan(kernel, launch, scratch=heads * Nq * (d + 2), repeats=-(-Nk // bc), step=bc)


def resident(kernel: Compiled, heads: int, Nq: int, Nk: int) -> Plan:
    """Kernel 6: at most a block for each multiprocessor, which takes one tile after the other."""
    blocks = min(_tiles(kernel, heads, Nq), kernel.on.multiprocessors)
    return _plan(kernel, _launch(kernel, blocks), box=kernel.tile.sizes["BOX"])


def split(kernel: Compiled, heads: int, Nq: int, Nk: int) -> Plan:
    """Few queries: a block for each split of the keys, then one for each row, which merges the results."""
    rows, sizes = _tiles(kernel, heads, Nq), kernel.tile.sizes
    count = splits(rows, Nk, kernel.tile.bc, kernel.on.multiprocessors * sizes["BLOCKS"])
    attend, merge = _launch(kernel, rows * count), _launch(kernel, heads * Nq, 1)
    merge.x, merge.shared, merge.early = sizes["MERGE_THREADS"], 0, kernel.on.capability >= EARLY_LAUNCH
    return _plan(kernel, attend, merge, scratch=heads * Nq * count * (kernel.width + 2), number=count)


def _tiles(kernel: Compiled, heads: int, Nq: int) -> int:
    return heads * -(-Nq // kernel.tile.br)


def _launch(kernel: Compiled, blocks: int, function: int = 0) -> Launch:
    tile, named = kernel.tile, kernel.functions[kernel.row.functions[function]]
    return Launch(int(named), blocks, tile.threads // tile.threads_y, tile.threads_y, tile.shared)


def _plan(kernel: Compiled, *launches: Launch, repeats: int = 1, **others: int) -> Plan:
    row, tile = kernel.row, kernel.tile
    sizes = {"width": kernel.width, "vectors": row.vectors, "br": tile.br, "bc": tile.bc, **others}
    return Plan((Launch * 2)(*launches), len(launches), repeats, **sizes)


def splits(rows: int, keys: int, together: int, slots: int) -> int:
    """Into how many splits the keys are cut, so that all of the GPU has work.

    rows: blocks for one split. together: keys that a block takes at a time. slots: blocks that run at once.
    More waves of blocks fill the last one better, and cost more merging.
    """
    most = -(-keys // together)
    best, chosen = -1.0, 1
    for waves in range(1, MOST_WAVES + 1):
        count = min(most, max(1, waves * slots // rows))
        used = rows * count / (-(-rows * count // slots) * slots) - WAVE_COST * waves
        if used > best + 1e-9:
            best, chosen = used, count
    return chosen
