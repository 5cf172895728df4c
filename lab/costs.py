"""The costs of each part by its own loop nest: operations, scratch, and bytes that come into a cache.

A stream is one matrix and the loops that read it again. If the data between two reads fits the cache, the
second read costs nothing. Otherwise the matrix comes in again, or the part of it in overfull sets: the least
recently used lines are replaced first. So a stream has the bytes that must come in at least, and for each
loop around it the working set (the bytes of one iteration) with the bytes that come in when the working set
does not fit. Every call starts with an empty cache. Written lines come in too.

COUNTS holds the counts by part. A part without a row there has operations and scratch, but no traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attention_ext import PARTS, extension
from attention_ext.parts import Dtype, check_part

FLOAT_BYTES = 4
LINE_BYTES = 64  # bytes of a cache line
CACHE_WAYS = 8  # lines of a set in most caches
OVERLAPPED_MULTIPLY_ADDS = 128  # most multiply-adds of the next sum that begin before a sum ends


@dataclass(frozen=True)
class Block:
    """Sizes that the kernels are compiled with.

    lanes, panel, rows: block of the SIMD product: floats of a vector, columns of a panel, rows.
    part2_tile, part2_depth: the sides of part 2's tiles. part4_step: keys of one of part 4's strips.
    """

    lanes: int
    panel: int
    rows: int
    part2_tile: int
    part2_depth: int
    part4_step: int

    @classmethod
    def of(cls, simd: str | None = "auto") -> Block:
        """The sizes as the extension over these SIMD helpers reports them, compiled first if need be."""
        names = ("lanes", "panel", "rows", "part2.T", "part2.DEPTH", "part4.STEP")
        return cls(*(extension.size(name, simd or "auto") for name in names))


@dataclass(frozen=True)
class Case:
    """One call: q is (heads, Nq, d), k and v are (heads, Nk, d), heads = B H. br, bc: the tile, if any.

    Traffic is counted for float32 only.
    """

    Nq: int
    Nk: int
    d: int
    heads: int = 1
    causal: bool = False
    br: int = 256
    bc: int = 256
    threads: int = 1
    dtype: Dtype = Dtype.FP32

    @property
    def visible(self) -> float:
        """The mean number of keys that a query sees."""
        return self.Nk - (self.Nq - 1) / 2 if self.causal else float(self.Nk)

    @property
    def flops(self) -> float:
        """Operations of the two products: 2 d each for every pair of a query and a key that it sees."""
        return 4.0 * self.heads * self.d * self.Nq * self.visible

    @property
    def Br(self) -> int:
        """Queries of a tile, as the kernel clips it."""
        return min(self.br, self.Nq)

    @property
    def Bc(self) -> int:
        """Keys of a tile, as the kernel clips it."""
        return min(self.bc, self.Nk)


@dataclass(frozen=True)
class Stream:
    """One matrix of one head and its bytes that come in.

    least: the least bytes. again: for each loop its working set and the bytes that come in if it does not
    fit. scratch: whether the same memory serves every head.
    """

    name: str
    least: float
    again: tuple[tuple[float, float], ...] = ()
    scratch: bool = False

    def traffic(self, cache: float) -> float:
        """Bytes that come into a cache of `cache` bytes."""

        def comes_in(working_set: float, moved: float) -> float:
            overfull = min(1, max(0, working_set - cache) / (cache / CACHE_WAYS))  # share of the sets
            return self.least + overfull * (moved - self.least)

        return max([self.least, *(comes_in(*loop) for loop in self.again)])


@dataclass(frozen=True)
class Count:
    """How a part's traffic is counted.

    streams: returns the streams of one head. chained: returns the multiply-adds of a call that wait for the
    one before; None if the part has many sums in progress. scalar: whether it uses one lane of a vector.
    """

    streams: Callable[[Case, Block], Iterator[Stream]]
    chained: Callable[[Case], float] | None = None
    scalar: bool = False


@dataclass(frozen=True)
class Costs:
    """Costs of one call.

    flops: useful floating-point operations, without exp and masked pairs. chained: multiply-adds that wait
    for the one before. scalar: whether one lane of a vector is used. streams: those of all heads together.
    """

    flops: float
    chained: float
    scalar: bool
    streams: tuple[Stream, ...]

    def traffic(self, cache: float) -> float:
        """Bytes that come into a cache of `cache` bytes in one call."""
        return sum(stream.traffic(cache) for stream in self.streams)


def costs(part: str, case: Case, block: Block) -> Costs | None:
    """Costs of a call of a part; None if its traffic is not counted.

    Raises ValueError for a name that is not in PARTS.
    """
    check_part(part)
    count = COUNTS.get(part)
    if count is None or case.dtype is not Dtype.FP32:
        return None
    streams = tuple(_of_all_heads(stream, case.heads) for stream in count.streams(case, block))
    return Costs(case.flops, count.chained(case) if count.chained else 0.0, count.scalar, streams)


def scratch(part: str, case: Case, simd: str | None = "auto") -> int:
    """Bytes of scratch of a call of a part, counted by its kernel.

    Raises ValueError for a name that is not in PARTS, and BuildError as extension.load() does.
    """
    if check_part(part).operator is None:  # PyTorch: S and P of all heads
        return FLOAT_BYTES * 2 * case.heads * case.Nq * case.Nk
    sizes = (1, case.heads, case.Nq, case.Nk, case.d)
    tile = {"br": case.Br, "bc": case.Bc} if PARTS[part].tiled else {}
    return extension.scratch(
        part, *sizes, threads=case.threads, simd=simd or "auto", dtype=case.dtype, **tile
    )


def _of_all_heads(stream: Stream, heads: int) -> Stream:
    """The stream of all heads from that of one head."""
    least = stream.least if stream.scratch else heads * stream.least
    again = tuple((size, heads * moved) for size, moved in stream.again)
    return Stream(stream.name, least, again, stream.scratch)


def _walk(rows: float, d: int, columns: int = 1) -> float:
    """Bytes of cache that a walk down `columns` columns of (rows, d) needs: some lines for each row.

    Rows that are 2^k lines apart share one of every 2^k sets of a cache, so they need 2^k times as much.
    """
    width = FLOAT_BYTES * d
    stride = width // LINE_BYTES if width % LINE_BYTES == 0 else 1
    apart, lines = stride & -stride, -(-FLOAT_BYTES * min(columns, d) // LINE_BYTES)
    return LINE_BYTES * rows * max(lines, apart)


def _part0(case: Case, block: Block) -> Iterator[Stream]:
    """Three calls of PyTorch over all heads; traffic inside each call is not counted."""
    S = FLOAT_BYTES * case.Nq * case.Nk  # masked or not
    K = V = FLOAT_BYTES * case.Nk * case.d
    Q = O = FLOAT_BYTES * case.Nq * case.d
    yield Stream("Q", Q)
    yield Stream("K", K)
    # S and P are written and read
    yield Stream("S, P", 2 * S, ((2 * case.heads * S, 4 * S),))
    yield Stream("V", V)
    yield Stream("O", O)


def _part1(case: Case, block: Block) -> Iterator[Stream]:
    """Each query reads all of K. Each number of the output reads a column of V and a row of S."""
    Nq, Nk, d, n = case.Nq, case.Nk, case.d, case.visible
    K = V = FLOAT_BYTES * Nk * d
    S, row, column = FLOAT_BYTES * Nq * n, FLOAT_BYTES * Nk, _walk(Nk, d)
    moved = Nq * FLOAT_BYTES * n * d
    yield Stream("Q", FLOAT_BYTES * Nq * d)
    yield Stream("K", K, ((K, moved),))
    # written, normalised, and read for V, one row for each of d columns
    yield Stream("S", S, ((S + K, 3 * S), (row + column, (2 + d) * S), (row, (4 + d) * S)), True)
    yield Stream("V", V, ((V + row, moved), (row + column, Nq * n * d * min(LINE_BYTES, FLOAT_BYTES * d))))
    yield Stream("O", FLOAT_BYTES * Nq * d)


def _part1_chained(case: Case) -> float:
    """Part 1 sums each number of the output in one chain of additions.

    A processor can begin only some of the operations after a sum. The scores are short sums, so several are
    in progress at a time.
    """
    return case.heads * case.Nq * max(0, case.visible - OVERLAPPED_MULTIPLY_ADDS) * case.d


def _part2(case: Case, block: Block) -> Iterator[Stream]:
    """S in tiles of T keys, each tile of K transposed once; then O in tiles of T queries, each reading V."""
    Nq, Nk, d, n = case.Nq, case.Nk, case.d, case.visible
    T, depth, panel = block.part2_tile, min(d, block.part2_depth), block.panel
    Q = O = FLOAT_BYTES * Nq * d
    V, S = FLOAT_BYTES * n * d, FLOAT_BYTES * Nq * n
    chunks = -(-d // block.part2_depth)
    tile, thin = FLOAT_BYTES * T * T, FLOAT_BYTES * T * depth  # a tile of S; one of Q or K
    strip = FLOAT_BYTES * panel * (depth + T)
    yield Stream("Q", Q, ((Q + FLOAT_BYTES * Nq * T, n / T * Q), (thin + strip, n / panel * Q)))
    yield Stream("K", FLOAT_BYTES * Nk * d)
    # a transposed tile of K: again for each T queries
    yield Stream("Kt", thin, ((2 * thin + tile, Nq / T * V),), True)
    # written, again for each further chunk of d; normalised; read for each panel of V
    passes, panels = 1 + chunks, -(-d // panel)
    chunk = FLOAT_BYTES * Nq * (T + depth)
    again = ((chunk, chunks * S), (S + V, (passes + 1) * S), (tile + thin, (passes + panels) * S))
    yield Stream("S", S, again, True)
    # for each T queries; a walk down a panel of columns for a few of them
    walk = _walk(T, d, panel) + FLOAT_BYTES * block.rows * T
    by_tile = (V + FLOAT_BYTES * T * n, max(1, Nq / T) * V)
    yield Stream("V", FLOAT_BYTES * Nk * d, (by_tile, (walk, Nq / block.rows * V)))
    yield Stream("O", O, ((2 * FLOAT_BYTES * T * d + tile, max(1, n / T) * O),))


def _part3(case: Case, block: Block) -> Iterator[Stream]:
    """Each query reads all of K, then all of V; its row of S lies between them."""
    Nq, d, n, threads = case.Nq, case.d, case.visible, case.threads
    K, row = FLOAT_BYTES * case.Nk * d, FLOAT_BYTES * case.Nk
    again = ((2 * K + row, Nq * FLOAT_BYTES * n * d),)
    least = threads * K  # each thread has its own cache
    yield Stream("Q", FLOAT_BYTES * Nq * d)
    yield Stream("K", least, again)
    # written after K, read for the maximum, read with V
    yield Stream("S", threads * row, ((K + row, 3 * FLOAT_BYTES * Nq * n),), True)
    yield Stream("V", least, again)
    yield Stream("O", FLOAT_BYTES * Nq * d)


def _part4(case: Case, block: Block) -> Iterator[Stream]:
    """Each tile of Br queries reads all of K and V, in tiles of Bc keys that all its strips share."""
    Nq, Nk, d, n, Br, Bc = case.Nq, case.Nk, case.d, case.visible, case.Br, case.Bc
    panel, rows, step = block.panel, block.rows, block.part4_step
    K, Q, S = FLOAT_BYTES * n * d, FLOAT_BYTES * Nq * d, FLOAT_BYTES * Nq * n
    Tr, strips = math.ceil(Nq / Br), math.ceil(Br / panel)
    state = FLOAT_BYTES * 2 * Br * d  # Qt and Ot
    St, thin = FLOAT_BYTES * step * panel, FLOAT_BYTES * min(step, Bc) * d
    strip = FLOAT_BYTES * 2 * min(Br, panel) * d + St  # Qt, Ot and St
    walk = St + _walk(min(step, Bc), d)
    # read by each tile, and in it by each strip; V by walks down a few columns, part of a line
    tile, each_strip = (2 * K + state, Tr * K), (2 * FLOAT_BYTES * Bc * d + strip, Tr * strips * K)
    least = min(case.threads, Tr) * FLOAT_BYTES * Nk * d  # each thread has its own cache
    yield Stream("Q", Q)
    yield Stream("K", least, (tile, each_strip))
    part_of_lines = (walk, Tr * strips * K * LINE_BYTES / (FLOAT_BYTES * rows))
    yield Stream("V", least, (tile, each_strip, part_of_lines))
    # Qt is read, Ot read and written for each step of keys
    by_tile = (state + 2 * FLOAT_BYTES * Bc * d, 2 * Q * max(1, n / Bc))
    yield Stream(
        "Qt, Ot", case.threads * state, (by_tile, (strip + 2 * thin, 2 * Q * max(1, n / step))), True
    )
    # written, normalised, and read for each few features
    yield Stream("S", case.threads * St, ((strip + thin, 2 * S), (walk, (2 + d / rows) * S)), True)
    yield Stream("O", Q)


COUNTS = {
    "part0": Count(_part0),
    "part1": Count(_part1, chained=_part1_chained, scalar=True),
    "part2": Count(_part2),
    "part3": Count(_part3),
    "part4": Count(_part4),
}
