"""The tiles of each CUDA kernel for heads of width d: sizes, threads, shared memory, macros.

A function gives the tiles for d, already padded, a dtype and a number of queries, the best first. The
formulas of shared memory are those of the sources in csrc/cuda/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from attention_ext.parts import Dtype


@dataclass(frozen=True)
class Tile:
    """How a kernel is compiled and launched for a d and a dtype.

    br, bc: queries and keys of a tile. threads: of a block, in x and y. shared: bytes of shared memory.
    macros: what its source is compiled with, beside FORMAT and HEAD_DIM.
    """

    br: int
    bc: int
    threads: tuple[int, int]
    shared: int
    macros: Mapping[str, int] = field(default_factory=dict, hash=False)


Tiles = Callable[[int, Dtype, int], Iterator[Tile]]


def step1(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
    yield Tile(32, 32, (32, 32), 4 * (3 * 32 * d + 32 * 32))


def step2(padding: int) -> Tiles:
    def tiles(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
        for side in (64, 32):
            numbers = 3 * side * (d + padding) + side * (side + padding)
            macros = {"BR": side, "BC": side, "PADDING": padding}
            yield Tile(side, side, (side * side // 16, 1), 4 * numbers, macros)

    return tiles


def step3(state: str) -> Tiles:
    def tiles(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
        threads = 128
        share = 1 if d <= 64 else 2 if d <= 128 else 4
        pitch = -(-d // (4 * share)) * 4 * share
        blocks = {"shared": 1, "registers": 3 if d <= 32 else 2, "spilled": 8}[state]
        for bc in (64, 32, 16):
            numbers = 2 * bc * pitch + (state == "shared") * threads * pitch // share
            macros = {"THREADS": threads, "SHARE": share, "BC": bc, "BLOCKS": blocks}
            yield Tile(
                threads // share, bc, (threads, 1), 4 * numbers, macros | {"STATE": int(state != "shared")}
            )

    return tiles


def step4(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
    """The fastest of a sweep on an H200; a row begins with the widest heads that it is for."""
    names = ("TX", "BC", "WARPS", "BLOCKS", "DIMS", "KEYS")
    rows = (
        (16, (4, 32, 4, 2, d, 32)),
        (32, (8, 64, 4, 2, d, 64)),
        (96, (8, 32, 4, 2, d, 32)),
        (128, (16, 64, 8, 1, d, 64), (16, 64, 4, 2, 64, 32)),
        (192, (16, 64, 8, 1, 64, 32), (16, 64, 4, 2, 32, 16)),
        (256, (32, 128, 4, 2, 32, 32), (32, 128, 2, 1, 32, 32)),
    )
    for sizes in next(row[1:] for row in rows if d <= row[0]):
        macros = dict(zip(names, sizes)) | {"TM": 8}
        columns, bc, warps, _, dims, keys = sizes
        warp_rows = 8 * 32 // columns
        br, width = warps * warp_rows, -(-d // (4 * columns)) * 4 * columns
        slab = max(bc * odd_vectors(dims), keys * width)
        p_row = warp_rows + (4 if columns == 32 else 8)
        numbers = br * odd_vectors(-(-d // dims) * dims) + 2 * slab + warps * keys * p_row
        yield Tile(br, bc, (32 * warps, 1), 4 * numbers, macros)


def odd_vectors(n: int) -> int:
    """At least n numbers, an odd number of 16 bytes."""
    return 4 * (n // 4 | 1)


def step5(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
    """The fastest of a sweep on an H200; a row begins with the widest heads that it is for."""
    names: tuple[str, ...] = ("WARPS", "M_TILES", "BC", "CHUNK", "STAGES", "BLOCKS")
    rows: tuple[tuple, ...]
    if dtype is Dtype.FP32:
        names += ("Q_SPLIT",)
        rows = (
            (32, (4, 2, 64, 32, 2, 2, 1)),
            (64, (4, 2, 32, 32, 2, 2, 1)),
            (128, (4, 1, 32, 32, 2, 2, 0)),
            (256, (4, 1, 16, 16, 2, 1, 0)),
        )
    else:
        names += ("PIPE", "Q_SHARED")
        rows = (
            (32, (4, 2, 64, 16, 3, 2, 2, 0)),
            (64, (4, 2, 64, 32, 3, 2, 1, 0)),
            (128, (4, 2, 64, 64, 2, 2, 0, 1), (4, 2, 32, 32, 3, 2, 1, 1)),
            (192, (4, 1, 32, 32, 3, 2, 1, 1)),
            (256, (8, 1, 48, 48, 2, 1, 0, 1), (4, 1, 32, 32, 2, 2, 0, 1)),
        )
    multiple = 32 if dtype is Dtype.FP32 else 16  # of the columns, as the products see them
    row_bytes = -(-d // multiple) * multiple * dtype.bytes
    stride = (row_bytes // 16 | 1) * 16
    for sizes in next(row[1:] for row in rows if d <= row[0]):
        macros = dict(zip(names, sizes))
        warps = macros["WARPS"]
        br = 16 * warps * macros["M_TILES"]
        copies = macros.get("Q_SHARED", 1) * (1 + macros.get("Q_SPLIT", 0))  # of Q in shared memory
        shared = macros["STAGES"] * 2 * macros["BC"] * stride + copies * br * row_bytes
        yield Tile(br, macros["BC"], (32 * warps, 1), shared, macros)


def step6(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
    """The fastest of a sweep on an H200. 128 threads copy; as many for each 64 queries multiply."""
    width = 32 if d <= 32 else -(-d // 64) * 64
    consumers, stages = (3 if d <= 64 else 2), 2
    bc = {32: 128, 64: 128, 128: 176, 192: 112, 256: 80}[width]
    shared = dtype.bytes * width * (64 * consumers + 2 * stages * bc) + 16 + 32 * stages + 1024
    macros = {"CONSUMERS": consumers, "BC": bc, "STAGES": stages}
    yield Tile(64 * consumers, bc, (128 * (consumers + 1), 1), shared, macros)


def split(d: int, dtype: Dtype, queries: int) -> Iterator[Tile]:
    """br: queries of a block. bc: keys of a block's step. A row begins with the most queries it is for."""
    names = ("QUERIES", "WARPS", "BLOCKS", "UNROLL")
    most = 4 if d > 128 else 8 if dtype is Dtype.FP32 else 6  # loads of one query that fit the registers
    rows = ((1, (1, 8, 2, most)), (2, (2, 8, 2, 4)), (4, (4, 4, 3, 4)))
    sizes = next((row[1] for row in rows if queries <= row[0]), (8, 8, 1, 4))
    each, warps, _, unroll = sizes
    vector = 16 // dtype.bytes
    lanes = min(32, 1 << (d // vector - 1).bit_length())  # of a row
    width = -(-d // (lanes * vector)) * lanes * vector
    shared = 4 * ((1 + warps) * each * width + 2 * warps * each)
    yield Tile(each, warps * unroll * 32 // lanes, (32 * warps, 1), shared, dict(zip(names, sizes)))
