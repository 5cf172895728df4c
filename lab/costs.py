"""What each part costs by its own loop nest: operations, scratch, and bytes that a cache takes in.

A stream is one matrix and the ways in which a part reads it again. If what passes between two reads fits
the cache, the second costs nothing; if not, the matrix comes in once more, or as much of it as lies in
overfull sets: what was used longest ago goes first. So a stream has what must come in at least, and for each
loop around it the bytes that pass in one turn, its working set, with what comes in when that does not fit.
Every call starts with an empty cache; what is written comes in too, as its lines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attention_ext import PARTS

F = 4  # bytes of a float
LINE = 64  # bytes of a cache line
WAYS = 8  # lines of a set, in most caches

# As the kernels have them: part2_blocked.cpp's tile and part4_flash.cpp's strip of keys.
T, DEPTH = 96, 64
STEP = 128

AHEAD = 128  # multiply-adds of the next sum that a processor may begin meanwhile, at most


@dataclass(frozen=True)
class Block:
    """What simd.h's product takes at a time: a panel of columns, a few vectors of so many lanes, and rows."""

    lanes: int = 16
    panel: int = 48
    rows: int = 8


AVX2 = Block(8, 24, 4)  # simd_portable.cpp's, where a simulator knows no wider vectors


@dataclass(frozen=True)
class Stream:
    """Bytes that one matrix brings in: at least, and per loop (its working set, what comes in beyond it).

    scratch: the same memory serves every head.
    """

    name: str
    least: float
    again: tuple[tuple[float, float], ...] = ()
    scratch: bool = False

    def traffic(self, cache: float) -> float:
        """Bytes that a cache of so many takes in."""

        def comes_in(working_set: float, moved: float) -> float:
            overfull = min(1, max(0, working_set - cache) / (cache / WAYS))  # share of the sets
            return self.least + overfull * (moved - self.least)

        return max([self.least, *(comes_in(*loop) for loop in self.again)])


@dataclass(frozen=True)
class Costs:
    """Of one call: floating-point operations (useful ones: neither exp nor what is masked), multiply-adds
    that wait for the one before, bytes of scratch, and the streams of all heads together.
    """

    flops: float
    chained: float
    scratch: float
    streams: tuple[Stream, ...]

    def traffic(self, cache: float) -> float:
        """Bytes that a cache of so many takes in, in one call."""
        return sum(stream.traffic(cache) for stream in self.streams)


def flops(Nq: int, Nk: int, d: int, heads: int, causal: bool) -> float:
    """Of the two products: 2 d each for every pair of query and key that the mask lets through."""
    return 4.0 * heads * d * Nq * _visible(Nq, Nk, causal)


def costs(
    part: str,
    Nq: int,
    Nk: int,
    d: int,
    *,
    heads: int = 1,
    causal: bool = False,
    br: int = 256,
    bc: int = 256,
    threads: int = 1,
    block: Block = Block(),
) -> Costs:
    """What a part costs; the arguments are attention()'s, heads = B H.

    Raises ValueError for another part.
    """
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it must be one of {', '.join(PARTS)}")
    n = _visible(Nq, Nk, causal)
    make = {"part0": _part0, "part1": _part1, "part2": _part2, "part3": _part3, "part4": _part4}[part]
    tile = min(br, Nq), min(bc, Nk)
    streams = tuple(make(Nq, Nk, n, d, heads, *tile, threads, block))
    all_heads = tuple(
        Stream(
            s.name,
            s.least if s.scratch else heads * s.least,
            tuple((size, heads * moved) for size, moved in s.again),
            s.scratch,
        )
        for s in streams
    )
    scratch = {
        "part0": 2 * heads * Nq * Nk,  # S and P
        "part1": Nq * Nk,
        "part2": Nq * Nk,
        "part3": threads * Nk,
        "part4": threads * _tile_floats(Nq, d, *tile, block.panel),
    }
    # Part 1 adds up each number of the output by itself, and a processor sees only some of what comes after a
    # sum. Its scores are short sums, of which several go on at a time; the other parts have many in hand.
    chained = heads * Nq * max(0, n - AHEAD) * d if part == "part1" else 0
    return Costs(flops(Nq, Nk, d, heads, causal), chained, F * scratch[part], all_heads)


def _visible(Nq: int, Nk: int, causal: bool) -> float:
    """Keys that a query sees, on average."""
    return Nk - (Nq - 1) / 2 if causal else float(Nk)


def _tile_floats(Nq: int, d: int, br: int, bc: int, panel: int) -> int:
    """Part 4's scratch for one thread."""
    if Nq <= 3:  # flash_few
        return bc + d
    row = -(-br // 16) * 16 | 16
    return 2 * d * row + (STEP + panel) * panel + 3 * row


def _walk(rows: float, d: int, columns: int = 1) -> float:
    """Cache that a walk down so many columns of (rows, d) needs: some lines for each row.

    Rows that lie 2^k lines apart share one of every 2^k sets of a cache: they need 2^k times as much of it.
    """
    stride = F * d // LINE if F * d % LINE == 0 else 1
    apart, lines = stride & -stride, -(-F * min(columns, d) // LINE)
    return LINE * rows * max(lines, apart)


def _part0(Nq, Nk, n, d, heads, br, bc, threads, block) -> Iterator[Stream]:
    """Three calls of PyTorch over all heads; inside them nothing is counted, as they are not ours."""
    S = F * Nq * Nk  # masked or not
    yield Stream("Q", F * Nq * d)
    yield Stream("K", F * Nk * d)
    # S is written and read, and so is P
    yield Stream("S, P", 2 * S, ((2 * heads * S, 4 * S),))
    yield Stream("V", F * Nk * d)
    yield Stream("O", F * Nq * d)


def _part1(Nq, Nk, n, d, heads, br, bc, threads, block) -> Iterator[Stream]:
    """Each query passes all of K; each output number passes a column of V and a row of S."""
    K = V = F * Nk * d
    S, row, column = F * Nq * n, F * Nk, _walk(Nk, d)
    yield Stream("Q", F * Nq * d)
    yield Stream("K", K, ((K, Nq * F * n * d),))
    # written, normalised, and read for V: as a row for each of d columns
    yield Stream("S", S, ((S + K, 3 * S), (row + column, (2 + d) * S), (row, (4 + d) * S)), True)
    yield Stream("V", V, ((V + row, Nq * F * n * d), (row + column, Nq * n * d * min(LINE, F * d))))
    yield Stream("O", F * Nq * d)


def _part2(Nq, Nk, n, d, heads, br, bc, threads, block) -> Iterator[Stream]:
    """S in tiles of T keys, K's transposed once; then O in tiles of T queries, V passing each."""
    Q = O = F * Nq * d  # noqa: E741
    V, S = F * n * d, F * Nq * n
    depth, panel = min(d, DEPTH), block.panel
    chunks = -(-d // DEPTH)
    tile, thin = F * T * T, F * T * depth  # of S; of Q or K
    yield Stream("Q", Q, ((Q + F * Nq * T, n / T * Q), (thin + F * panel * (depth + T), n / panel * Q)))
    yield Stream("K", F * Nk * d)
    # a tile of K, transposed: again for each T queries
    yield Stream("Kt", thin, ((2 * thin + tile, Nq / T * V),), True)
    # written, again for each further chunk of d; normalised; read for V, for each panel of it
    passes, panels = 1 + chunks, -(-d // panel)
    yield Stream(
        "S",
        S,
        ((F * Nq * (T + depth), chunks * S), (S + V, (passes + 1) * S), (tile + thin, (passes + panels) * S)),
        True,
    )
    # for each T queries; walked down a panel of columns for a few of them
    walk = _walk(T, d, panel) + F * block.rows * T
    yield Stream("V", F * Nk * d, ((V + F * T * n, max(1, Nq / T) * V), (walk, Nq / block.rows * V)))
    yield Stream("O", O, ((2 * F * T * d + tile, max(1, n / T) * O),))


def _part3(Nq, Nk, n, d, heads, br, bc, threads, block) -> Iterator[Stream]:
    """Each query passes all of K, then all of V; its row of S lies between them."""
    K, row = F * Nk * d, F * Nk
    again = ((2 * K + row, Nq * F * n * d),)
    least = threads * K  # each thread has a cache of its own
    yield Stream("Q", F * Nq * d)
    yield Stream("K", least, again)
    # written behind K, read for the maximum, and beside V
    yield Stream("S", threads * row, ((K + row, 3 * F * Nq * n),), True)
    yield Stream("V", least, again)
    yield Stream("O", F * Nq * d)


def _part4(Nq, Nk, n, d, heads, br, bc, threads, block) -> Iterator[Stream]:
    """Each tile of Br queries passes all of K and V, in tiles of Bc keys that all its strips share."""
    K, Q, S = F * n * d, F * Nq * d, F * Nq * n
    panel, rows = block.panel, block.rows
    Tr, strips = math.ceil(Nq / br), math.ceil(br / panel)
    state = F * 2 * br * d  # Qt and Ot
    St, thin = F * STEP * panel, F * min(STEP, bc) * d
    strip = F * 2 * min(br, panel) * d + St  # of all three
    walk = St + _walk(min(STEP, bc), d)
    # passed by each tile, in it by each strip; V is walked down a few columns at a time, part of a line
    tile, each_strip = (2 * K + state, Tr * K), (2 * F * bc * d + strip, Tr * strips * K)
    least = min(threads, Tr) * F * Nk * d  # each thread has a cache of its own
    yield Stream("Q", Q)
    yield Stream("K", least, (tile, each_strip))
    yield Stream("V", least, (tile, each_strip, (walk, Tr * strips * K * LINE / (F * rows))))
    # for each STEP keys Qt is read, Ot read and written
    again = ((state + 2 * F * bc * d, 2 * Q * max(1, n / bc)), (strip + 2 * thin, 2 * Q * max(1, n / STEP)))
    yield Stream("Qt, Ot", threads * state, again, True)
    # written, normalised, and read for each few features
    yield Stream("S", threads * St, ((strip + thin, 2 * S), (walk, (2 + d / rows) * S)), True)
    yield Stream("O", Q)
