"""The table of CUDA kernels: what each step takes, and its tile for a width of heads.

Neither torch nor CUDA is imported here. The kernels are csrc/cuda/step*.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from attention_ext.parts import Dtype

WIDEST = 256  # the largest d
MOST_ROWS = 2**31 - 1024  # of queries or keys; the kernels count them in 32 bits, up to a tile further
STEP5_WARPS = 4
ALL = (Dtype.FP32, Dtype.BF16, Dtype.FP16)
HALVES = (Dtype.BF16, Dtype.FP16)
FORMATS = {Dtype.FP32: 0, Dtype.BF16: 1, Dtype.FP16: 2}  # csrc/cuda/call.h has them too


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
    macros: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A kernel.

    name: what --step takes. file: in csrc/cuda/. kernels: its functions there.
    summary: the algorithm in a few words. why: what it improves on, and what still limits it.
    tiles: gives the tiles for d and a dtype, the best first; the first that fits shared memory is taken.
    multiple: d is padded to a multiple of it. vectors: rows are read 16 bytes at a time; inputs whose rows do
    not begin at multiples of 16 bytes are copied first.
    capability: the least compute capability. only: the kernel runs on this major capability alone.
    """

    name: str
    file: str
    kernels: tuple[str, ...]
    summary: str
    why: str
    tiles: Callable[[int, Dtype], Iterator[Tile]]
    dtypes: tuple[Dtype, ...] = ALL
    multiple: int = 1
    vectors: bool = False
    capability: tuple[int, int] = (7, 5)
    only: bool = False

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run the kernel."""
        return capability >= self.capability and not (self.only and capability[0] != self.capability[0])

    def padded(self, d: int) -> int:
        """The width of the heads that the kernel is compiled for."""
        return -(-d // self.multiple) * self.multiple

    def tile(self, d: int, dtype: Dtype, shared: int) -> Tile:
        """The tile for heads of width d, where a block may have so many bytes of shared memory.

        Raises ValueError if the least tile needs more.
        """
        tiles = list(self.tiles(self.padded(d), dtype))
        for tile in tiles:
            if tile.shared <= shared:
                return tile
        raise ValueError(
            f"step is {self.name!r}; with d = {d} it needs {min(t.shared for t in tiles)} bytes of shared "
            f"memory, and this GPU gives a block {shared}; choose another step"
        )


def tiles_of_step1(d: int, dtype: Dtype) -> Iterator[Tile]:
    yield Tile(32, 32, (32, 32), 4 * (3 * 32 * d + 32 * 32))


def tiles_of_step2(padding: int) -> Callable[[int, Dtype], Iterator[Tile]]:
    def tiles(d: int, dtype: Dtype) -> Iterator[Tile]:
        for side in (64, 32):
            numbers = 3 * side * (d + padding) + side * (side + padding)
            macros = {"BR": side, "BC": side, "PADDING": padding}
            yield Tile(side, side, (side * side // 16, 1), 4 * numbers, macros)

    return tiles


def tiles_of_step3(state: str) -> Callable[[int, Dtype], Iterator[Tile]]:
    def tiles(d: int, dtype: Dtype) -> Iterator[Tile]:
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


def tiles_of_step5(d: int, dtype: Dtype) -> Iterator[Tile]:
    # d up to which a row holds; the rest are the macros of step5.cu, the fastest of a sweep on an H200
    names = ("M_TILES", "BC", "CHUNK", "STAGES", "PIPE", "Q_SHARED", "BLOCKS", "Q_SPLIT")
    halves = (
        (32, 2, 64, 16, 3, 2, 0, 2, 0),
        (64, 2, 64, 16, 3, 1, 0, 2, 0),
        (128, 2, 32, 16, 3, 1, 1, 2, 0),
        (192, 1, 32, 16, 3, 1, 1, 2, 0),
        (256, 1, 32, 16, 2, 0, 1, 2, 0),
    )
    singles = (
        (32, 2, 64, 32, 2, 0, 1, 2, 1),
        (64, 2, 32, 32, 2, 0, 1, 2, 1),
        (128, 1, 32, 32, 2, 0, 1, 2, 0),
        (256, 1, 16, 16, 2, 0, 1, 1, 0),
    )
    fp32 = dtype is Dtype.FP32
    row = next(row for row in (singles if fp32 else halves) if d <= row[0])
    macros = dict(zip(names, row[1:])) | {"WARPS": STEP5_WARPS}
    wide = -(-d // (32 if fp32 else 16)) * (32 if fp32 else 16)  # as the products see it
    stride = (wide * dtype.bytes // 16 | 1) * 16
    warp_rows = STEP5_WARPS * macros["M_TILES"]
    fragments = wide // 8 * (8 if macros["Q_SPLIT"] else 4) if fp32 else wide // 16 * 4
    shared = macros["STAGES"] * 2 * macros["BC"] * stride + macros["Q_SHARED"] * warp_rows * fragments * 128
    yield Tile(16 * warp_rows, macros["BC"], (32 * STEP5_WARPS, 1), shared, macros)


STEPS = {
    step.name: step
    for step in (
        Step(
            "1",
            "step1.cu",
            ("attention_step1",),
            "one launch for each tile of keys, the state in global memory",
            "Every launch reads and writes the state of all rows, and loads the queries again; at d = 32 a "
            "warp's reads of K are all in one bank of shared memory.",
            tiles_of_step1,
        ),
        Step(
            "2-unpadded",
            "step2.cu",
            ("attention_step2",),
            "step 2 without padding",
            "Rows of a tile are d numbers apart, so a column of 32 rows is in few banks of shared memory, "
            "which serve one row after the other.",
            tiles_of_step2(0),
        ),
        Step(
            "2",
            "step2.cu",
            ("attention_step2",),
            "one launch, tiles in shared memory, 4 x 4 scores a thread",
            "The state stays in the block, and each number from shared memory serves four products. Shared "
            "memory still gives less than the arithmetic takes.",
            tiles_of_step2(1),
        ),
        Step(
            "3-shared",
            "step3.cu",
            ("attention_step3",),
            "a row for each thread, the state in shared memory",
            "Each strip of keys reads and writes the row of O in shared memory.",
            tiles_of_step3("shared"),
        ),
        Step(
            "3-spilled",
            "step3.cu",
            ("attention_step3",),
            "a row for each thread, the state in local arrays that spill",
            "The source is step 3's; with few registers allowed, the arrays go to local memory, which is "
            "global memory behind the L1 cache. More blocks are resident, and they are slower.",
            tiles_of_step3("spilled"),
        ),
        Step(
            "3",
            "step3.cu",
            ("attention_step3",),
            "a row for each thread, the state in registers",
            "A warp reads each number of K and V once for 32 rows, without conflicts and without an exchange "
            "of weights between threads.",
            tiles_of_step3("registers"),
        ),
        Step(
            "5",
            "step5.cu",
            ("attention_step5",),
            "tensor cores with mma.sync, float32 as three products of tf32",
            "The products take the tensor cores; the softmax, of which as much as possible runs beside them, "
            "and shared memory are what is left.",
            tiles_of_step5,
            multiple=8,
            vectors=True,
            capability=(8, 0),
        ),
    )
}


def check_step(step: str | int) -> Step:
    """The row of a step, by its name or number. Raises TypeError or ValueError if there is none."""
    if not isinstance(step, (str, int)) or isinstance(step, bool):
        raise TypeError(f"step is a {type(step).__name__}; it must be a name or a number")
    if str(step) not in STEPS:
        raise ValueError(f"step is {step!r}; it must be one of {', '.join(STEPS)}")
    return STEPS[str(step)]


def default(d: int, dtype: Dtype, capability: tuple[int, int], shared: int) -> Step:
    """The fastest step for heads of width d on a GPU of this capability and shared memory for a block.

    Raises ValueError if there is none.
    """
    for name in FASTEST:
        step = STEPS[name]
        if dtype not in step.dtypes or not step.runs_on(capability):
            continue
        try:
            step.tile(d, dtype, shared)
        except ValueError:
            continue
        return step
    major, minor = capability
    raise ValueError(
        f"no step takes d = {d} on this GPU, of compute capability {major}.{minor} with {shared} bytes of "
        "shared memory for a block"
    )


# The fastest first, in every dtype at (100, 1, 4096, d) on an H200 (gpt.py bench --device cuda).
FASTEST = ("5", "3", "2", "1")
