"""The tiles of each CUDA kernel for padded heads of width d, a dtype, a number of queries and a capability.

The best come first. Their sizes reach the kernel as macros.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from shakespeare.attention_ext.parts import Dtype


@dataclass(frozen=True)
class Access:
    """Accesses of warps to a matrix in shared memory, for each tile of queries and each tile of keys.

    times: by all warps of a block together. rows: different addresses among a warp's lanes, `stride` numbers
    apart, by default neighbours. vector: numbers that a lane takes there. scattered: lanes with the same
    address are not neighbours. once: once for a tile of queries.
    """

    matrix: str
    times: float
    rows: int = 32
    stride: int = 0
    vector: int = 1
    scattered: bool = False
    once: bool = False


@dataclass(frozen=True)
class Tile:
    """How a kernel is compiled and launched for a d and a dtype, and what a block does for a tile.

    br, bc: queries and keys of a tile. threads: of a block, in `threads_y` rows. shared: bytes of shared
    memory. sizes: what the source is compiled with, as macros, beside those of all (csrc/cuda/call.h).
    accesses: to shared memory; none if they are left to a profiler. exponentials: for each score. tensor: the
    tensor cores multiply.
    """

    br: int
    bc: int
    threads: int
    shared: int
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    threads_y: int = 1
    accesses: tuple[Access, ...] = ()
    exponentials: float = 1
    tensor: bool = False


@dataclass(frozen=True)
class Queries:
    """A call's. of_head: of all heads that share k and v. few: splitting the keys is faster.

    modified: a bias or a user's header changes their scores, which takes registers.
    """

    of_head: int
    share: int = 1024  # of all heads, for each multiprocessor
    few: bool = False
    modified: bool = False


LARGE = Queries(1024)
SMALL = 64  # with no larger share, tiles of 64 queries are at most as many as the multiprocessors
Capability = tuple[int, int]
Tiles = Callable[[int, Dtype, Queries, Capability], Iterator[Tile]]
ASYNCHRONOUS = (8, 0)  # the least capability with cp.async, which needs no registers; a T4 is before it


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is at least `number`."""
    return -(-number // multiple) * multiple


def odd(number: int, vector: int) -> int:
    """At least `number`, an odd multiple of `vector`: rows so far apart begin in different banks."""
    return (number // vector | 1) * vector


def kernel1(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    side = 32  # also the warps of a block; each has a row of S
    chunks = -(-d // 32)
    width = 4 if d % 4 == 0 else 2 if d % 2 == 0 else 1
    accesses = (
        *(Access(matrix, chunks * side) for matrix in "QKV"),
        Access("Q", d / width * side, rows=1, vector=width),
        Access("K", d / width * side, stride=d, vector=width),
        Access("S", side),
        Access("S", (1 + chunks) * side / 4 * side, rows=1, vector=4),
        Access("V", chunks * side * side),
    )
    # each lane has the whole row's, for l and again for each of its columns of O
    exponentials = 1 + side + chunks * side
    shared = 4 * (3 * side * d + side * side)
    yield Tile(side, side, side * side, shared, {}, side, accesses, exponentials)


def kernel2(padding: int) -> Tiles:
    def tiles(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
        for side in (64, 32):
            pitch = d + padding
            p_pitch = side + padding
            columns = side // 4  # threads that share 4 rows
            rows = 32 // columns
            warps = side * side // 16 // 32
            width = 2 if pitch % 2 == 0 else 1
            p_width = 2 if p_pitch % 2 == 0 else 1
            accesses = (
                Access("Q", side * d / 32, once=True),
                *(Access(matrix, side * d / 32) for matrix in "KV"),
                Access("Q", 4 * d / width * warps, rows, pitch, width),
                Access("K", 4 * d / width * warps, columns, pitch, width, scattered=True),
                Access("P", 16 * warps, rows, stride=32),  # its rows overlap in the banks
                Access("P", 4 * side / p_width * warps, rows, p_pitch, p_width),
                Access("V", -(-d // columns) * side * warps, columns),
            )
            shared = 4 * (3 * side * pitch + side * p_pitch)
            exponentials = 1 + columns / side
            yield Tile(side, side, side * side // 16, shared, {"PADDING": padding}, 1, accesses, exponentials)

    return tiles


def kernel3(state: str) -> Tiles:
    def tiles(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
        threads = 128
        in_shared = state == "shared"
        share = 1 if d <= 64 else 2 if d <= 128 else 4
        pitch = round_up(d, 4 * share)
        blocks = {"shared": 1, "registers": 3 if d <= 32 else 2, "spilled": 8}[state]
        sizes = {"SHARE": share, "PITCH": pitch, "STRIP": 8, "BLOCKS": blocks, "O_SHARED": int(in_shared)}
        strip = sizes["STRIP"]
        fours = pitch // (4 * share)  # of a thread's columns
        warps = threads // 32
        for bc in (64, 32, 16):
            accesses = [Access(matrix, bc * pitch / 32) for matrix in "KV"]
            for matrix in "KV":
                accesses.append(Access(matrix, bc * warps * fours, share, vector=4, scattered=share > 2))
            if in_shared:  # O: read once a strip, written corrected and with the strip's sum
                accesses.append(Access("O", 3 * bc / strip * warps * fours, vector=4))
            numbers = 2 * bc * pitch + in_shared * threads * pitch // share
            exponentials = share * (strip + 1) / strip
            shape = threads // share, bc, threads
            yield Tile(*shape, 4 * numbers, sizes, 1, tuple(accesses), exponentials)

    return tiles


def kernel4(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """The fastest on an H200, or before 8.0 those that fit."""
    rows_of_thread = 8
    # widest heads, then for each tile TX, keys, warps, BLOCKS, DIMS, KEYS
    rows: tuple[tuple, ...] = (
        (16, (4, 32, 4, 2, d, 32)),
        (32, (8, 64, 4, 2, d, 64)),
        (96, (8, 32, 4, 2, d, 32)),
        (128, (16, 64, 8, 1, d, 64), (16, 64, 4, 2, 64, 32)),
        (192, (16, 64, 8, 1, 64, 32), (16, 64, 4, 2, 32, 16)),
        (256, (32, 128, 4, 2, 32, 32), (32, 128, 2, 1, 32, 32)),
    )
    if capability < ASYNCHRONOUS:
        rows_of_thread = 8 if d <= 128 else 4
        rows = (
            (16, (4, 32, 2, 4, d, 8)),
            (32, (8, 32, 4, 2, d, 8)),
            (64, (8, 32, 2, 2, 32, 8)),
            (96, (8, 32, 4, 1, 32, 8)),
            (224, (16, 64, 4, 1, 32, 16)),
            (256, (16, 64, 3, 1, 32, 16)),
        )
    for columns, bc, warps, blocks, dims, keys in next(row[1:] for row in rows if d <= row[0]):
        warp_rows = rows_of_thread * 32 // columns
        sizes = {
            "TX": columns,
            "TM": rows_of_thread,
            "BLOCKS": blocks,
            "DIMS": dims,
            "KEYS": keys,
            "WARP_ROWS": warp_rows,
            "Q_ROW": odd(round_up(d, dims), 4),
            "K_ROW": odd(dims, 4),
            "V_ROW": round_up(d, 4 * columns),
            "P_ROW": warp_rows + (4 if warp_rows == 8 else 8),
        }
        sizes["SLAB"] = max(bc * sizes["K_ROW"], keys * sizes["V_ROW"])
        numbers = warps * (warp_rows * sizes["Q_ROW"] + keys * sizes["P_ROW"]) + 2 * sizes["SLAB"]
        fours = round_up(d, dims) // 4  # of a row
        groups = 32 // columns  # of rows
        accesses = (
            Access("Q", warps * warp_rows * fours / 32, vector=4, once=True),
            *(Access(matrix, bc * fours / 32, vector=4) for matrix in "KV"),
            Access("Q", warps * fours * rows_of_thread, groups, 4 * sizes["Q_ROW"], 4),
            Access("K", warps * fours * bc / columns, columns, sizes["K_ROW"], 4),
            Access("P", warps * bc / columns * rows_of_thread / 4, vector=4),
            Access("P", warps * bc * rows_of_thread / 4, groups, vector=4),
            Access("V", warps * bc * sizes["V_ROW"] / columns / 4, columns, vector=4),
        )
        yield Tile(warps * warp_rows, bc, 32 * warps, 4 * numbers, sizes, 1, accesses)


def kernel5(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """As kernel4()."""
    # widest heads, then for each tile warps, keys, and the numbers that `names` names
    names: tuple[str, ...] = ("M_TILES", "CHUNK", "STAGES", "BLOCKS")
    rows: tuple[tuple, ...]
    if dtype is Dtype.FP32:
        names += ("Q_SPLIT",)
        rows = (
            (32, (4, 64, 2, 32, 2, 2, 1)),
            (64, (4, 32, 2, 32, 2, 2, 1)),
            (128, (4, 32, 1, 32, 2, 2, 0)),
            (
                256,
                (8, 32, 1, 32, 2, 1, 0),
                (8, 32, 1, 32, 1, 1, 0),
                (8, 16, 1, 16, 1, 1, 0),
                (4, 16, 1, 16, 2, 1, 0),
            ),
        )
    elif capability < ASYNCHRONOUS:
        names += ("PIPE", "Q_SHARED")
        rows = (
            (32, (4, 64, 2, 32, 2, 2, 0, 0)),
            (64, (4, 32, 2, 32, 2, 2, 0, 0)),
            (192, (8, 32, 1, 32, 2, 1, 0, 0)),
            (256, (4, 16, 1, 16, 2, 1, 0, 1), (3, 16, 1, 16, 2, 1, 0, 1)),
        )
    else:
        names += ("PIPE", "Q_SHARED")
        rows = (
            (32, (4, 64, 2, 16, 3, 2, 2, 0)),
            (64, (4, 64, 2, 32, 3, 2, 1, 0)),
            (128, (4, 64, 2, 64, 2, 2, 0, 1), (4, 32, 2, 32, 3, 2, 1, 1)),
            (192, (4, 32, 1, 32, 3, 2, 1, 1)),
            (256, (8, 48, 1, 48, 2, 1, 0, 1), (4, 32, 1, 32, 2, 2, 0, 1)),
        )
        if queries.share <= SMALL:
            rows = (
                (32, (4, 128, 1, 64, 3, 2, 2, 0)),
                (128, (4, 64, 1, 32, 3, 2, 2, 0), (4, 32, 2, 32, 3, 2, 1, 1)),
                *rows[3:],
            )
    width = round_up(d, 32 if dtype is Dtype.FP32 else 16)  # as the products see it
    stride = odd(width * dtype.bytes, 16)
    for warps, bc, *others in next(row[1:] for row in rows if d <= row[0]):
        sizes = {**dict(zip(names, others)), "WIDTH": width, "STRIDE": stride}
        br = 16 * warps * sizes["M_TILES"]
        copies = sizes.get("Q_SHARED", 1) * (1 + sizes.get("Q_SPLIT", 0))  # of Q in shared memory
        shared = sizes["STAGES"] * 2 * bc * stride + copies * br * width * dtype.bytes
        row = width * dtype.bytes / 128  # accesses of a whole warp
        accesses = [Access(matrix, (1 + warps) * bc * row) for matrix in "KV"]
        if copies:  # read again for each CHUNK of keys
            accesses.append(Access("Q", copies * br * row, once=True))
            accesses.append(Access("Q", copies * br * row * bc / sizes.get("CHUNK", bc)))
        yield Tile(br, bc, 32 * warps, shared, sizes, 1, tuple(accesses), tensor=True)


def kernel6(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """The fastest of a sweep on an H100. 128 threads copy; as many for each 64 queries multiply."""
    width = 32 if d <= 32 else round_up(d, 64)
    wide = width <= 128 and queries.share >= 192 and (width < 128 or queries.of_head >= 2048)
    wide = wide and not queries.modified
    # more queries share K and V, if no multiprocessor idles; small tiles waste less of short rows
    widest = 80 if queries.of_head >= 4096 else 64
    bc = {32: 128, 64: 128, 128: 80 if wide else 128, 192: 112, 256: widest}[width]
    groups = 3 if wide else 2
    stages = 3 if wide or width <= 64 else 2
    shared = dtype.bytes * width * (64 * groups + 2 * stages * bc) + 24 * groups + 32 * stages + 1024
    sizes = {"WIDTH": width, "BOX": min(64, width), "STAGES": stages, "SHARED": shared}
    yield Tile(64 * groups, bc, 128 * (groups + 1), shared, sizes, tensor=True)


def split(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """bc: keys that a block takes at a time."""
    merge = {"MERGE_THREADS": 128, "MERGE_LANES": 1 << (d // 4 - 1).bit_length()}
    if _multiplies_16(dtype, queries.of_head, capability):
        sharers = 2 if d > 160 else 1
        strip = 8 if dtype is Dtype.FP32 and d > 32 else 16
        width = round_up(d, 32 * sharers)
        q_row = odd(width * dtype.bytes, 64)
        sizes = {"TENSOR": 1, "STRIP": strip, "BLOCKS": 2, "LANES": 1, "WIDTH": width, "Q_ROW": q_row}
        for warps in (8 if d <= 64 else 4, 2):
            teams = warps // sharers
            shared = 4 * teams * 16 * (width + 2) + 16 * q_row
            macros = {**sizes, "SHARERS": sharers, **merge}
            yield Tile(16, teams * strip, 32 * warps, shared, macros, tensor=True)
        return
    # queries, warps, blocks of a multiprocessor, loads of a lane at a time
    shape = 8, 8, 1, 4
    if queries.of_head == 1:
        shape = 1, 8, 2, 8 if d <= 128 and dtype is Dtype.FP32 else 4
    elif queries.of_head == 2:
        shape = 2, 8, 2, 4
    elif queries.of_head <= 4:
        shape = (4, 8, 2, 4) if d <= 128 else (4, 4, 3, 4)
    br, warps, blocks, loads = shape
    vector = 16 // dtype.bytes
    lanes = min(32, 1 << (d // vector - 1).bit_length())
    width = round_up(d, lanes * vector)
    sizes = {"TENSOR": 0, "BLOCKS": blocks, "LOADS": loads, "LANES": lanes, "WIDTH": width}
    shared = 4 * ((1 + warps) * br * width + 2 * warps * br)
    macros = {**sizes, "SHARERS": 1, **merge}
    # all lanes of a row have its weight
    yield Tile(br, warps * loads * 32 // lanes, 32 * warps, shared, macros, exponentials=lanes)


def _multiplies_16(dtype: Dtype, queries: int, capability: Capability) -> bool:
    """Whether the tensor cores multiply a tile of 16 queries in split: they have the dtype and are faster."""
    if dtype is not Dtype.FP16 and capability < ASYNCHRONOUS:
        return False
    return queries > (4 if dtype is Dtype.FP32 else 2)


def documents(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """A thread for each key."""
    yield Tile(1, 1, 256, 0)


def backward1(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """The widest that fits is the best: a number from shared memory serves more products."""
    pitch = round_up(d, 16) | 1
    for side, each in ((64, 4), (32, 2), (16, 1), (8, 1)):
        numbers = 4 * side * pitch + 2 * side * (side + 1)
        threads = (side // each) ** 2
        yield Tile(side, side, threads, 4 * numbers, {"EACH": each, "PITCH": pitch}, exponentials=2)


def on_tensor_cores(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """backward2 and 3, as kernel4(), of a sweep on an H100: wide heads leave registers for one sum a warp."""
    # widest heads, then for each tile warps, and the numbers that `names` names
    names = "K_M K_CHUNK K_HELD K_BLOCKS K_PAIRED Q_M Q_CHUNK Q_HELD Q_BLOCKS TILE STAGES".split()
    rows: tuple[tuple, ...] = (
        (32, (4, 2, 32, 0, 3, 0, 2, 32, 1, 3, 64, 3)),
        (64, (4, 2, 32, 0, 2, 0, 2, 32, 1, 2, 64, 2)),
        (128, (8, 2, 32, 0, 1, 1, 2, 32, 0, 1, 64, 2), (8, 1, 32, 1, 1, 0, 1, 64, 1, 1, 64, 2)),
        (256, (8, 1, 32, 1, 1, 1, 1, 32, 0, 1, 32, 2)),
    )
    if dtype is Dtype.FP32:
        rows = (
            (32, (4, 2, 32, 0, 2, 0, 2, 32, 0, 2, 64, 2)),
            (64, (8, 2, 32, 0, 1, 1, 2, 32, 0, 1, 64, 2), (4, 1, 32, 0, 2, 0, 1, 32, 0, 2, 32, 2)),
            (128, (8, 2, 16, 0, 1, 1, 1, 32, 0, 1, 32, 2), (4, 1, 16, 0, 2, 0, 1, 16, 0, 2, 16, 2)),
            (256, (4, 1, 16, 0, 1, 1, 1, 16, 0, 1, 16, 2)),
        )
    width = round_up(d, 32 if dtype is Dtype.FP32 else 16)  # as the products see it
    stride = odd(width * dtype.bytes, 16)
    lanes = min(32, 1 << (width * dtype.bytes // 16 - 1).bit_length())
    for warps, *others in next((row[1:] for row in rows if d <= row[0]), ()):
        sizes = dict(zip(names, others), WIDTH=width, STRIDE=stride, ROW_LANES=lanes)
        row = 16 * warps * width * dtype.bytes  # bytes of one of X and Y
        half = 1 + sizes["K_PAIRED"]
        keys = row * sizes["K_M"] * (1 - sizes["K_HELD"]) * 2 // half
        if sizes["K_PAIRED"]:
            keys += warps // 2 * sizes["K_M"] * 16 * sizes["K_CHUNK"] * dtype.bytes
        in_shared = max(keys, row * sizes["Q_M"] * (1 - sizes["Q_HELD"]) * 2)
        shared = sizes["STAGES"] * sizes["TILE"] * (2 * stride + 8) + in_shared
        shape = 16 * warps * sizes["Q_M"], 16 * warps * sizes["K_M"] // half, 32 * warps
        yield Tile(*shape, shared, sizes, exponentials=2, tensor=True)


def backward4(d: int, dtype: Dtype, queries: Queries, capability: Capability) -> Iterator[Tile]:
    """Blocks own keys, or above d = 128 queries: the sums of two gradients would not fit the registers."""
    threads = 384  # 128 copy and add
    align = 1024
    if d > 128:
        width = round_up(d, 64)
        sizes = {"TURN_ROWS": 64, "WIDTH": width, "BOX": 64, "ROW_LANES": 32}
        shared = 768 * width + 32768 + 136 + align
        yield Tile(128, 64, threads, shared, sizes, exponentials=1, tensor=True)
        return
    keys = 128
    stages = 3  # of Q; dO and dS have two
    width, tile = next(row for row in ((32, 128), (64, 128), (128, 64)) if d <= row[0])
    sizes = {
        "TURN_ROWS": tile,
        "STAGES": stages,
        "WIDTH": width,
        "BOX": min(64, width),
        "ROW_LANES": width // 8,
    }
    of_tile = tile * (2 * width * (stages + 2) + 8 * stages + 4 * keys + 4 * width)
    shared = 4 * width * keys + of_tile + 16 * stages + 112 + align
    yield Tile(tile, keys, threads, shared, sizes, exponentials=1, tensor=True)
