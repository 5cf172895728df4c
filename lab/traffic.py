"""The traffic of each part by its own loop nest: operations, and bytes that come into a cache.

A stream is one matrix and the loops that read it again. If the data between two reads fits the cache, the
second read costs nothing. Otherwise the matrix comes in again, or the part of it in overfull sets: the least
recently used lines are replaced first. So a stream has the floats that must come in at least, and for each
loop around it the working set (the floats of one iteration) with the floats that come in when the working set
does not fit. Every call starts with an empty cache. Written lines come in too. The counts are for float32.

COUNTS holds the counts by part; those of a part without a row are unknown. web/python_to_js.py translates
this file for the page, and names the forms of Python that it knows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shakespeare.attention_ext.parts import Dtype

FLOAT_BYTES = 4
LINE = 16  # floats of a cache line
CACHE_WAYS = 8  # lines of a set in most caches


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


@dataclass(frozen=True)
class Case:
    """One call: q is (heads, Nq, d), k and v are (heads, Nk, d), heads = B H. br, bc: the tile, if any.

    keys: the mean number of keys that a query sees by rules; 0 without rules.
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
    keys: float = 0

    @property
    def seen(self) -> float:
        """The mean number of keys that a query sees."""
        unruled = self.Nk - (self.Nq - 1) / 2 if self.causal else self.Nk
        return self.keys if self.keys else unruled

    @property
    def span(self) -> float:
        """The keys of neighbouring queries."""
        return self.keys if self.keys else self.Nk

    def reach(self, rows: int) -> float:
        """The mean number of keys that a tile of so many queries sees, about."""
        return min(self.Nk, self.keys + rows - 1) if self.keys else self.seen

    @property
    def flops(self) -> float:
        """Operations of the two products: 2 d each for every pair of a query and a key that it sees."""
        return 4 * self.heads * self.d * self.Nq * self.seen

    @property
    def Br(self) -> int:
        """Queries of a tile, as the kernel clips it."""
        return min(self.br, self.Nq)

    @property
    def Bc(self) -> int:
        """Keys of a tile, as the kernel clips it."""
        return min(self.bc, self.Nk)

    @property
    def Q(self) -> int:
        """Floats of one head's q, or of its output."""
        return self.Nq * self.d

    @property
    def K(self) -> int:
        """Floats of one head's k, or of its v."""
        return self.Nk * self.d


@dataclass(frozen=True)
class Stream:
    """One matrix and its bytes that come in; the counts of a part are in floats and for one head.

    minimum: the least bytes. again: for each loop its working set and the bytes that come in if it does not
    fit. scratch: whether the same memory serves every head.
    """

    name: str
    minimum: float
    again: Sequence[tuple[float, float]] = ()
    scratch: bool = False

    def traffic(self, cache: float) -> float:
        """Bytes that come into a cache of `cache` bytes."""
        loops = [
            self.minimum + overfull(working_set, cache) * (moved - self.minimum)
            for working_set, moved in self.again
        ]
        return max(0, self.minimum, *loops)


def overfull(working_set: float, cache: float) -> float:
    """The share of a cache's sets that a working set overfills."""
    return min(1, max(0, working_set - cache) / (cache / CACHE_WAYS))


def all_heads(stream: Stream, heads: int) -> Stream:
    """The stream of all heads in bytes, from that of one head in floats."""
    minimum = FLOAT_BYTES * stream.minimum * (1 if stream.scratch else heads)
    again = [(FLOAT_BYTES * size, FLOAT_BYTES * heads * moved) for size, moved in stream.again]
    return Stream(stream.name, minimum, again, stream.scratch)


def streams(part: str, case: Case, block: Block) -> list[Stream] | None:
    """The streams of a call of a part in float32, all heads together; None if they are not counted."""
    if part not in COUNTS:
        return None
    return [all_heads(stream, case.heads) for stream in COUNTS[part](case, block)]


def traffic(counted: Iterable[Stream], cache: float) -> float:
    """Bytes that come into a cache of `cache` bytes in one call with these streams."""
    return sum([stream.traffic(cache) for stream in counted])


def walk(rows: float, d: int, columns: int = 1) -> float:
    """Floats of cache that a walk down `columns` columns of (rows, d) needs: some lines for each row.

    Rows that are 2^k lines apart share one of every 2^k sets of a cache, so they need 2^k times as much.
    """
    stride = d // LINE if d % LINE == 0 else 1
    lines = math.ceil(min(columns, d) / LINE)
    return LINE * rows * max(lines, stride & -stride)


def part0(case: Case, block: Block) -> Iterator[Stream]:
    """Three calls of PyTorch over all heads; traffic inside each call is not counted."""
    S = case.Nq * case.Nk  # masked or not
    yield Stream("Q", case.Q)
    yield Stream("K", case.K)
    # S and P are written and read
    yield Stream("S, P", 2 * S, [(2 * case.heads * S, 4 * S)])
    yield Stream("V", case.K)
    yield Stream("O", case.Q)


def part1(case: Case, block: Block) -> Iterator[Stream]:
    """Each query reads all of K. Each number of the output reads a column of V and a row of S."""
    d = case.d
    K = case.K
    S = case.Nq * case.seen
    row = case.span
    column = walk(case.span, d)
    moved = S * d
    yield Stream("Q", case.Q)
    yield Stream("K", K, [(row * d, moved)])
    # written, normalised, and read for V, one row for each of d columns
    yield Stream("S", S, [(S + K, 3 * S), (row + column, (2 + d) * S), (row, (4 + d) * S)], True)
    yield Stream("V", K, [(row * d + row, moved), (row + column, moved * min(LINE, d))])
    yield Stream("O", case.Q)


def part2(case: Case, block: Block) -> Iterator[Stream]:
    """S in tiles of T keys, each tile of K transposed once; then O in tiles of T queries, each reading V."""
    Nq = case.Nq
    d = case.d
    n = case.reach(block.part2_tile)
    Q = case.Q
    T = block.part2_tile
    depth = min(d, block.part2_depth)
    panel = block.panel
    V = n * d
    S = Nq * n
    chunks = math.ceil(d / block.part2_depth)
    tile = T * T  # of S
    thin = T * depth  # of Q or K
    strip = panel * (depth + T)
    yield Stream("Q", Q, [(Q + Nq * T, n / T * Q), (thin + strip, n / panel * Q)])
    yield Stream("K", case.K)
    # a transposed tile of K: again for each T queries
    yield Stream("Kt", thin, [(2 * thin + tile, Nq / T * V)], True)
    # written, again for each further chunk of d; normalised; read for each panel of V
    passes = 1 + chunks
    panels = math.ceil(d / panel)
    chunk = Nq * (T + depth)
    again = [(chunk, chunks * S), (S + V, (passes + 1) * S), (tile + thin, (passes + panels) * S)]
    yield Stream("S", S, again, True)
    # for each T queries; a walk down a panel of columns for a few of them
    few = walk(T, d, panel) + block.rows * T
    yield Stream("V", case.K, [(V + T * n, max(1, Nq / T) * V), (few, Nq / block.rows * V)])
    yield Stream("O", Q, [(2 * T * d + tile, max(1, n / T) * Q)])


def part3(case: Case, block: Block) -> Iterator[Stream]:
    """Each query reads all of K, then all of V; its row of S lies between them."""
    K = case.span * case.d
    row = case.span
    S = case.Nq * case.seen
    again = [(2 * K + row, S * case.d)]
    minimum = case.threads * case.K  # each thread has its own cache
    yield Stream("Q", case.Q)
    yield Stream("K", minimum, again)
    # written after K, read for the maximum, read with V
    yield Stream("S", case.threads * row, [(K + row, 3 * S)], True)
    yield Stream("V", minimum, again)
    yield Stream("O", case.Q)


def part4(case: Case, block: Block) -> Iterator[Stream]:
    """Each tile of Br queries reads all of K and V, in tiles of Bc keys that all its strips share."""
    d = case.d
    Q = case.Q
    Br = case.Br
    Bc = case.Bc
    panel = block.panel
    step = block.part4_step
    n = case.reach(min(panel, Br))
    K = n * d
    S = case.Nq * n
    Tr = math.ceil(case.Nq / Br)
    strips = math.ceil(Br / panel)
    state = 2 * Br * d  # Qt and Ot
    St = step * panel
    thin = min(step, Bc) * d
    strip = 2 * min(Br, panel) * d + St  # Qt, Ot and St
    few = St + walk(min(step, Bc), d)
    # read by each tile, and in it by each strip; V by walks down a few columns, part of a line
    tile_floats = case.reach(Br) * d
    tile = (2 * tile_floats + state, Tr * tile_floats)
    each_strip = (2 * Bc * d + strip, Tr * strips * K)
    minimum = min(case.threads, Tr) * case.K  # each thread has its own cache
    yield Stream("Q", Q)
    yield Stream("K", minimum, [tile, each_strip])
    yield Stream("V", minimum, [tile, each_strip, (few, Tr * strips * K * LINE / block.rows)])
    # Qt is read, Ot read and written for each step of keys
    by_tile = (state + 2 * Bc * d, 2 * Q * max(1, n / Bc))
    by_strip = (strip + 2 * thin, 2 * Q * max(1, n / step))
    yield Stream("Qt, Ot", case.threads * state, [by_tile, by_strip], True)
    # written, normalised, and read for each few features
    yield Stream("S", case.threads * St, [(strip + thin, 2 * S), (few, (2 + d / block.rows) * S)], True)
    yield Stream("O", Q)


COUNTS = {"part0": part0, "part1": part1, "part2": part2, "part3": part3, "part4": part4}
