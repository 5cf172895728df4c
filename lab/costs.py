"""What each part costs by its own loop nest: operations, scratch, and bytes that a cache takes in.

A stream is one matrix and the ways in which a part reads it again. If what passes between two reads fits
the cache, the second read costs nothing. If it does not fit, the matrix comes in once more, or as much of it
as lies in overfull sets: the least recently used lines are replaced first. So a stream has the bytes that
must come in at least, and for each loop around it the working set (the bytes that pass in one turn) with the
bytes that come in when the working set does not fit. Every call starts with an empty cache. Written lines
come in too.

COUNTS holds the counts by part. A part without a row there has operations and scratch, but no traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attention_ext import PARTS, extension
from attention_ext.parts import Dtype, check_part

FLOAT_BYTES = 4
LINE_BYTES = 64  # of a cache line
CACHE_WAYS = 8  # lines of a set, in most caches
OVERLAPPED_MULTIPLY_ADDS = 128  # of the next sum that a processor may begin before a sum ends, at most


@dataclass(frozen=True)
class Block:
    """Sizes that the kernels are compiled with.

    lanes, panel, rows: what the SIMD product takes at a time: floats of a vector, columns of a panel, rows.
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
        """Keys that a query sees, on average."""
        return self.Nk - (self.Nq - 1) / 2 if self.causal else float(self.Nk)

    @property
    def flops(self) -> float:
        """Operations of the two products: 2 d each for every pair of query and key that the mask admits."""
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
    """One matrix of one head, and the bytes that it brings in.

    least: bytes at least. again: for each loop its working set, and the bytes that come in if that does not
    fit. scratch: the same memory serves every head.
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

    streams: gives the streams of one head. chained: gives the multiply-adds of a call that wait for the one
    before; None where the part has many sums in progress. scalar: works with one lane of a vector.
    """

    streams: Callable[[Case, Block], Iterator[Stream]]
    chained: Callable[[Case], float] | None = None
    scalar: bool = False


@dataclass(frozen=True)
class Costs:
    """Costs of one call.

    flops: useful floating-point operations, without exp and what is masked. chained: multiply-adds that wait
    for the one before. scalar: works with one lane of a vector. streams: of all heads together.
    """

    flops: float
    chained: float
    scalar: bool
    streams: tuple[Stream, ...]

    def traffic(self, cache: float) -> float:
        """Bytes that come into a cache of `cache` bytes in one call."""
        return sum(stream.traffic(cache) for stream in self.streams)


def costs(part: str, case: Case, block: Block) -> Costs | None:
    """Costs of a call of a part; None where its traffic is not counted.

    Raises ValueError for a name that is not in PARTS.
    """
    check_part(part)
    count = COUNTS.get(part)
    if count is None or case.dtype is not Dtype.FP32:
        return None
    streams = tuple(_of_all_heads(stream, case.heads) for stream in count.streams(case, block))
    return Costs(case.flops, count.chained(case) if count.chained else 0.0, count.scalar, streams)


def scratch(part: str, case: Case, simd: str | None = "auto") -> int:
    """Bytes of scratch that a call of a part takes, as its kernel counts them.

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
    """The stream of one head as that of all heads."""
    least = stream.least if stream.scratch else heads * stream.least
    again = tuple((size, heads * moved) for size, moved in stream.again)
    return Stream(stream.name, least, again, stream.scratch)


def _walk(rows: float, d: int, columns: int = 1) -> float:
    """Cache that a walk down so many columns of (rows, d) needs: some lines for each row.

    Rows that lie 2^k lines apart share one of every 2^k sets of a cache: they need 2^k times as much of it.
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
    # S is written and read, and so is P
    yield Stream("S, P", 2 * S, ((2 * case.heads * S, 4 * S),))
    yield Stream("V", V)
    yield Stream("O", O)


def _part1(case: Case, block: Block) -> Iterator[Stream]:
    """Each query passes all of K; each output number passes a column of V and a row of S."""
    Nq, Nk, d, n = case.Nq, case.Nk, case.d, case.visible
    K = V = FLOAT_BYTES * Nk * d
    S, row, column = FLOAT_BYTES * Nq * n, FLOAT_BYTES * Nk, _walk(Nk, d)
    moved = Nq * FLOAT_BYTES * n * d
    yield Stream("Q", FLOAT_BYTES * Nq * d)
    yield Stream("K", K, ((K, moved),))
    # written, normalised, and read for V: as a row for each of d columns
    yield Stream("S", S, ((S + K, 3 * S), (row + column, (2 + d) * S), (row, (4 + d) * S)), True)
    yield Stream("V", V, ((V + row, moved), (row + column, Nq * n * d * min(LINE_BYTES, FLOAT_BYTES * d))))
    yield Stream("O", FLOAT_BYTES * Nq * d)


def _part1_chained(case: Case) -> float:
    """Part 1 sums each number of the output in one chain of additions.

    A processor sees only some of what comes after a sum. The scores are short sums, of which several are in
    progress at a time.
    """
    return case.heads * case.Nq * max(0, case.visible - OVERLAPPED_MULTIPLY_ADDS) * case.d


def _part2(case: Case, block: Block) -> Iterator[Stream]:
    """S in tiles of T keys, each tile of K transposed once; then O in tiles of T queries, V passing each."""
    Nq, Nk, d, n = case.Nq, case.Nk, case.d, case.visible
    T, depth, panel = block.part2_tile, min(d, block.part2_depth), block.panel
    Q = O = FLOAT_BYTES * Nq * d
    V, S = FLOAT_BYTES * n * d, FLOAT_BYTES * Nq * n
    chunks = -(-d // block.part2_depth)
    tile, thin = FLOAT_BYTES * T * T, FLOAT_BYTES * T * depth  # of S; of Q or K
    strip = FLOAT_BYTES * panel * (depth + T)
    yield Stream("Q", Q, ((Q + FLOAT_BYTES * Nq * T, n / T * Q), (thin + strip, n / panel * Q)))
    yield Stream("K", FLOAT_BYTES * Nk * d)
    # a tile of K, transposed: again for each T queries
    yield Stream("Kt", thin, ((2 * thin + tile, Nq / T * V),), True)
    # written, again for each further chunk of d; normalised; read for V, for each panel of it
    passes, panels = 1 + chunks, -(-d // panel)
    chunk = FLOAT_BYTES * Nq * (T + depth)
    again = ((chunk, chunks * S), (S + V, (passes + 1) * S), (tile + thin, (passes + panels) * S))
    yield Stream("S", S, again, True)
    # for each T queries; walked down a panel of columns for a few of them
    walk = _walk(T, d, panel) + FLOAT_BYTES * block.rows * T
    by_tile = (V + FLOAT_BYTES * T * n, max(1, Nq / T) * V)
    yield Stream("V", FLOAT_BYTES * Nk * d, (by_tile, (walk, Nq / block.rows * V)))
    yield Stream("O", O, ((2 * FLOAT_BYTES * T * d + tile, max(1, n / T) * O),))


def _part3(case: Case, block: Block) -> Iterator[Stream]:
    """Each query passes all of K, then all of V; its row of S lies between them."""
    Nq, d, n, threads = case.Nq, case.d, case.visible, case.threads
    K, row = FLOAT_BYTES * case.Nk * d, FLOAT_BYTES * case.Nk
    again = ((2 * K + row, Nq * FLOAT_BYTES * n * d),)
    least = threads * K  # each thread has a cache of its own
    yield Stream("Q", FLOAT_BYTES * Nq * d)
    yield Stream("K", least, again)
    # written behind K, read for the maximum, and beside V
    yield Stream("S", threads * row, ((K + row, 3 * FLOAT_BYTES * Nq * n),), True)
    yield Stream("V", least, again)
    yield Stream("O", FLOAT_BYTES * Nq * d)


def _part4(case: Case, block: Block) -> Iterator[Stream]:
    """Each tile of Br queries passes all of K and V, in tiles of Bc keys that all its strips share."""
    Nq, Nk, d, n, Br, Bc = case.Nq, case.Nk, case.d, case.visible, case.Br, case.Bc
    panel, rows, step = block.panel, block.rows, block.part4_step
    K, Q, S = FLOAT_BYTES * n * d, FLOAT_BYTES * Nq * d, FLOAT_BYTES * Nq * n
    Tr, strips = math.ceil(Nq / Br), math.ceil(Br / panel)
    state = FLOAT_BYTES * 2 * Br * d  # Qt and Ot
    St, thin = FLOAT_BYTES * step * panel, FLOAT_BYTES * min(step, Bc) * d
    strip = FLOAT_BYTES * 2 * min(Br, panel) * d + St  # of all three
    walk = St + _walk(min(step, Bc), d)
    # passed by each tile, in it by each strip; V is walked down a few columns at a time, part of a line
    tile, each_strip = (2 * K + state, Tr * K), (2 * FLOAT_BYTES * Bc * d + strip, Tr * strips * K)
    least = min(case.threads, Tr) * FLOAT_BYTES * Nk * d  # each thread has a cache of its own
    yield Stream("Q", Q)
    yield Stream("K", least, (tile, each_strip))
    part_of_lines = (walk, Tr * strips * K * LINE_BYTES / (FLOAT_BYTES * rows))
    yield Stream("V", least, (tile, each_strip, part_of_lines))
    # for each step of keys Qt is read, Ot read and written
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
