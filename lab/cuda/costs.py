"""What each CUDA kernel moves by its own loop nest: through shared memory and through global memory.

Shared memory serves a warp's access in wavefronts of 128 bytes, one number of each of 32 banks. Lanes that
read the same number share it; numbers of one bank at different addresses take a wavefront each, a conflict.
Global memory is counted as what the kernel asks for, and by lab.traffic.Stream as what the L2 cache misses.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shakespeare.attention_ext.cuda.kernels import Kernel
from shakespeare.attention_ext.cuda.launches import splits
from shakespeare.attention_ext.cuda.tiles import Tile, up
from shakespeare.lab.traffic import Case, Stream

BANKS, NUMBER = 32, 4  # of shared memory; bytes of a number in a bank
WAVEFRONT = BANKS * NUMBER
LANES, SAME = range(32), [0] * 32


@dataclass(frozen=True)
class Shared:
    """Accesses to one matrix in shared memory: their wavefronts, and the fewest without bank conflicts."""

    name: str
    wavefronts: float
    fewest: float


@dataclass(frozen=True)
class Count:
    """A call's counts, over all launches. tensor: products of bfloat16 for each useful operation, or 0.

    flops: useful operations. products: those computed for each useful one.
    """

    launches: int
    blocks: int
    exponentials: float
    shared: tuple[Shared, ...]
    streams: tuple[Stream, ...]
    tensor: float = 0
    flops: float = 0
    products: float = 1

    @property
    def wavefronts(self) -> float:
        """All wavefronts through shared memory."""
        return sum(each.wavefronts for each in self.shared)

    @property
    def asked(self) -> float:
        """Bytes that the kernel reads from global memory and writes to it."""
        return self.from_memory(1)  # a cache that holds nothing

    def from_memory(self, l2: int) -> float:
        """Bytes that come from the GPU's memory, or go there, with an L2 cache of `l2` bytes."""
        return sum(stream.traffic(l2) for stream in self.streams)


@dataclass(frozen=True)
class Launch:
    """The launch that is counted. resident: blocks that the GPU holds at a time."""

    case: Case
    kernel: Kernel
    tile: Tile
    resident: int

    @property
    def d(self) -> int:
        """The width of the heads in the kernel."""
        return self.kernel.padded(self.case.d)

    @property
    def bytes(self) -> int:
        """Bytes of a number in global memory."""
        return self.case.dtype.bytes

    @property
    def tensor(self) -> int:
        """Products of bfloat16 for each of a tensor core's: float32 takes three of tf32, at half the rate."""
        return 1 if self.bytes == 2 else 6

    @property
    def tiles(self) -> int:
        """Tiles of queries of a head."""
        return -(-self.case.Nq // self.tile.br)

    @property
    def together(self) -> int:
        """Heads that are computed at a time."""
        return min(self.case.heads, -(-self.resident // self.tiles) + 1)

    def visits(self, br: int = 0, bc: int = 0) -> int:
        """How often a tile of br queries meets one of bc keys in a head; by default the kernel's own tile."""
        return int((-(-seen(self.case, br or self.tile.br) // (bc or self.tile.bc))).sum())


def counted(launch: Launch) -> Count:
    """The counts of a call."""
    return COUNTS[launch.kernel.functions[0]](launch)


def seen(case: Case, br: int) -> np.ndarray:
    """The keys that each tile of br queries of a head sees."""
    queries = np.minimum(np.arange(br, case.Nq + br, br, dtype=np.int64), case.Nq)  # up to the tile's last
    return queries + case.Nk - case.Nq if case.causal else np.full_like(queries, case.Nk)


def access(name: str, times: float, addresses: Sequence[int], width: int = 1) -> Shared:
    """`times` accesses of a warp to these addresses, in numbers, each to `width` neighbouring numbers."""
    wavefronts, fewest = banked(tuple(addresses), width)
    return Shared(name, times * wavefronts, times * fewest)


@functools.cache
def banked(addresses: tuple[int, ...], width: int) -> tuple[int, int]:
    """The wavefronts of an access by 32 lanes, and how many would do if there were no bank conflicts.

    Accesses of two numbers are served by halves of a warp, those of four by quarters; two of these at once if
    each lane has its neighbour's address, or that of the lane after the next one.
    """
    size = len(addresses) // width
    groups = [addresses[i : i + size] for i in range(0, len(addresses), size)]
    if width > 1:
        pairs = [first + second for first, second in zip(groups[::2], groups[1::2])]
        together = (any(all(of[i] == of[i ^ far] for i in range(2 * size)) for far in (1, 2)) for of in pairs)
        halves = ([of] if one else [of[:size], of[size:]] for of, one in zip(pairs, together))
        groups = [group for split in halves for group in split]

    def words(of: tuple[int, ...]) -> set[int]:
        return {address + i for address in of for i in range(width)}

    wavefronts = sum(max(Counter(word % BANKS for word in words(group)).values()) for group in groups)
    return wavefronts, -(-len(words(addresses)) // BANKS)


def _count(
    of: Launch,
    exponentials: float,
    accesses: Iterable[Shared] = (),
    streams: tuple[Stream, ...] | None = None,
    blocks: int | None = None,
    launches: int = 1,
    tensor: int = 0,
    backward: bool = False,
) -> Count:
    """The counts of all heads from those of one; by default with a block for each tile of queries."""
    heads, wavefronts, fewest = of.case.heads, defaultdict[str, float](float), defaultdict[str, float](float)
    for one in accesses:
        wavefronts[one.name] += heads * one.wavefronts
        fewest[one.name] += heads * one.fewest
    blocks = heads * of.tiles if blocks is None else blocks
    shared = tuple(Shared(name, wavefronts[name], fewest[name]) for name in wavefronts)
    flops, products = of.case.flops * (2.5 if backward else 1), 7 / 5 if backward else 1
    exponentials *= heads
    return Count(launches, blocks, exponentials, shared, streams or _once(of), tensor, flops, products)


def _vector(*strides: int) -> int:
    """Numbers that the compiler reads at a time where all rows begin at multiples of so many."""
    return next(width for width in (4, 2, 1) if all(stride % width == 0 for stride in strides))


def _once(of: Launch) -> tuple[Stream, ...]:
    """The global memory of a kernel with one launch: each tile of queries passes K and V."""
    case, d = of.case, of.d
    Q = O = float(of.bytes * case.heads * case.Nq * d)
    K = float(of.bytes * case.heads * case.Nk * d)
    passed = min(of.visits() * of.tile.bc, of.tiles * case.Nk)  # keys, by all tiles of a head
    # between two passes over a head's K and V, those of all heads that are worked on
    again = ((2 * K / case.heads * of.together, float(of.bytes * case.heads * passed * d)),)
    return Stream("Q", Q), Stream("K", K, again), Stream("V", K, again), Stream("O", O)


def _kernel1(of: Launch) -> Count:
    """32 warps of a block have a row of S each; each launch passes all Q and the whole state."""
    case, tile, d = of.case, of.tile.br, of.d
    launches = -(-case.Nk // tile)
    # the last launch writes the output, of rows too that see none of its keys
    visited = of.visits() + int((seen(case, tile) <= (launches - 1) * tile).sum())
    warps, chunks, width = tile * visited, -(-d // 32), _vector(d)

    def shared() -> Iterator[Shared]:
        for name in "QKV":
            yield access(name, chunks * warps, LANES)  # written
        yield access("Q", d / width * warps, SAME, width)
        yield access("K", d / width * warps, [lane * d for lane in LANES], width)
        yield access("S", warps, LANES)
        yield access("S", (1 + chunks) * tile / 4 * warps, SAME, 4)
        yield access("V", chunks * tile * warps, LANES)

    moved = float(case.heads * visited * tile * d * of.bytes)
    Q = float(case.heads * case.Nq * d * of.bytes)
    state = float(case.heads * case.Nq * (d + 2) * 4)
    passes = 2 * (visited - of.tiles) * tile * (d + 2) * 4  # read and written, but at the ends
    tiles_of_keys = 2.0 * of.together * tile * d * of.bytes
    streams = (
        Stream("Q", Q, ((Q + state, moved),)),
        Stream("K", Q / case.Nq * case.Nk, ((tiles_of_keys, moved),)),
        Stream("V", Q / case.Nq * case.Nk, ((tiles_of_keys, moved),)),
        Stream("m, l, O", state, ((Q + state, max(state, float(case.heads * passes))),)),
        Stream("O", Q),
    )
    # each lane has the whole row's, for l and again for each of its columns of O
    exponentials = warps * 32.0 * (1 + tile + chunks * tile)
    return _count(of, exponentials, shared(), streams, launches * case.heads * of.tiles, launches)


def _kernel2(of: Launch) -> Count:
    """4 x 4 scores a thread; a warp has 4 rows or 8 of 16 columns or 8."""
    d, br, bc, padding = of.d, of.tile.br, of.tile.bc, of.tile.sizes["PADDING"]
    columns, warps = bc // 4, br * bc // 16 // 32
    pitch, p_pitch, mine = d + padding, bc + padding, -(-d // columns)
    x, y = [lane % columns for lane in LANES], [lane // columns for lane in LANES]
    width, p_width = (min(_vector(n), 2) for n in (pitch, p_pitch))  # of 4 rows; more would not fit registers
    visited = of.visits()

    def load(name: str, count: int, times: int) -> Iterator[Shared]:
        for i in range(0, count * d, 32):
            yield access(name, times, [(i + lane) // d * pitch % 32 + (i + lane) % d for lane in LANES])

    def shared() -> Iterator[Shared]:
        yield from load("Q", br, of.tiles)
        for name in "KV":
            yield from load(name, bc, visited)
        times = visited * warps
        yield access("Q", 4 * d / width * times, [row * pitch for row in y], width)
        yield access("K", 4 * d / width * times, [column * pitch for column in x], width)
        yield access("P", 16 * times, [row * p_pitch + column for row, column in zip(y, x)])
        yield access("P", 4 * bc / p_width * times, [row * p_pitch for row in y], p_width)
        yield access("V", mine * bc * times, x)

    return _count(of, visited * float(br * bc + br * columns), shared())


def _kernel3(of: Launch) -> Count:
    """A thread has a row, or a part of its columns; it goes over the keys by strips of 8."""
    strip, share, O_shared = (of.tile.sizes[name] for name in ("STRIP", "SHARE", "O_SHARED"))
    bc, warps, mine = of.tile.bc, of.tile.threads // 32, of.tile.sizes["PITCH"] // (4 * share)
    visited, strips = of.visits(), of.visits(bc=strip)

    def shared() -> Iterator[Shared]:
        for name in "KV":
            yield access(name, visited * bc * 4 * mine * share / 32, LANES)  # written
            yield access(name, strips * warps * strip * mine, [4 * (lane % share) for lane in LANES], 4)
        if O_shared:  # O: read once a strip, written corrected and with the strip's sum
            yield access("O", 3 * strips * warps * mine, [4 * lane for lane in LANES], 4)

    return _count(of, strips * of.tile.threads * (strip + 1.0), shared())


def _kernel4(of: Launch) -> Count:
    """TX threads share a row; a thread has TM rows, BC / TX keys and d / TX columns of O."""
    names = ("TX", "TM", "WARP_ROWS", "DIMS", "Q_ROW", "K_ROW", "V_ROW", "P_ROW")
    TX, TM, rows, dims, q_row, k_row, v_row, p_row = (of.tile.sizes[name] for name in names)
    BC, warps = of.tile.bc, of.tile.threads // 32
    zorder = TX < 32  # neighbouring lanes have neighbouring groups of rows
    rg = [lane // (2 * TX) * 2 + lane % 2 if zorder else lane // TX for lane in LANES]
    tx = [lane // 2 % TX if zorder else lane % TX for lane in LANES]
    visited, by_warp = of.visits(), of.visits(br=rows)
    deepest = up(of.d, dims) // 4  # reads of 16 bytes of a row

    def shared() -> Iterator[Shared]:
        fours = [4 * lane for lane in LANES]
        yield access("Q", of.tiles * warps * rows * deepest / 32, fours, 4)
        for name in "KV":
            yield access(name, visited * BC * deepest / 32, fours, 4)
        yield access("Q", by_warp * deepest * TM, [4 * row * q_row for row in rg], 4)
        yield access("K", by_warp * deepest * BC / TX, [column * k_row for column in tx], 4)
        yield access("P", by_warp * BC / TX * TM / 4, [c * p_row + 4 * row for c, row in zip(tx, rg)], 4)
        yield access("P", by_warp * BC * TM / 4, [4 * row for row in rg], 4)
        yield access("V", by_warp * BC * v_row / TX / 4, [4 * column for column in tx], 4)

    return _count(of, by_warp * float(rows * BC), shared())


def _kernel5(of: Launch) -> Count:
    """Each warp reads all of a tile of K and V into fragments; its part of Q stays there.

    float32 takes three products of numbers cut to tf32, each at half the rate of bfloat16.
    """
    br, bc, sizes, visited = of.tile.br, of.tile.bc, of.tile.sizes, of.visits()
    row, readers = sizes["WIDTH"] * of.bytes / WAVEFRONT, of.tile.threads // 32

    def shared() -> Iterator[Shared]:
        moved = {name: visited * (1 + readers) * bc * row for name in "KV"}
        if sizes.get("Q_SHARED", 1):  # written once, and read again for each CHUNK of keys
            parts = of.tiles + visited * bc / sizes.get("CHUNK", bc)
            split = 1 + sizes.get("Q_SPLIT", 0)  # as pairs of high and low
            moved["Q"] = br * row * split * parts
        for name, wavefronts in moved.items():
            yield Shared(name, wavefronts, wavefronts)

    return _count(of, visited * float(br * bc), shared(), tensor=of.tensor)


def _kernel6(of: Launch) -> Count:
    """A block takes tile after tile. What passes through shared memory is left to a profiler."""
    blocks = min(of.resident, of.case.heads * of.tiles)
    return _count(of, of.visits() * float(of.tile.br * of.tile.bc), blocks=blocks, tensor=of.tensor)


def _split(of: Launch) -> Count:
    """A block has a split of the keys, whose rows a second launch merges. All lanes of a row have its weight.

    What passes through shared memory, the warps' results, does not grow with Nk and is not counted.
    """
    case, rows = of.case, of.case.heads * of.tiles
    count = splits(rows, case.Nk, of.tile.bc, of.resident)
    partial = 4.0 * case.heads * case.Nq * count * (of.d + 2)
    streams = (*_once(of), Stream("m, l, O", partial, ((partial, 2 * partial),)))
    exponentials = float(case.Nq * case.seen * of.tile.sizes["LANES"])
    tensor = of.tile.sizes["TENSOR"] * of.tensor
    blocks = rows * count + case.heads * case.Nq
    return _count(of, exponentials, (), streams, blocks, 2, tensor)


def _backward_rows(of: Launch) -> Count:
    """All launches of backward.h: over tiles of queries for each block of keys, and the other way.

    What passes through shared memory is left to a profiler.
    """
    case, br, bc, visited = of.case, of.tile.br, of.tile.bc, of.visits()
    size = float(of.bytes * case.heads * of.d)
    streams = [Stream("O", size * case.Nq), Stream("dQ, dK, dV", size * (case.Nq + 2 * case.Nk))]
    for names, length, rows in (("Q", "dO"), case.Nq, br), (("K", "V"), case.Nk, bc):
        loop = 2 * size / case.heads * length * of.together, size * (visited * rows + length)
        streams += [Stream(name, size * length, (loop,)) for name in names]
    blocks = case.heads * (of.tiles + -(-case.Nk // bc))
    tensor = 0 if "EACH" in of.tile.sizes else of.tensor
    return _count(of, 2.0 * visited * br * bc, (), tuple(streams), blocks, 3, tensor, backward=True)


# By the first function of a kernel.
EVERY: tuple[Any, ...] = (_kernel1, _kernel2, _kernel3, _kernel4, _kernel5, _kernel6, _split, _backward_rows)
COUNTS: dict[str, Callable[[Launch], Count]] = {f"attention{count.__name__}": count for count in EVERY}
