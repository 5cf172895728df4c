"""The table of CUDA kernels: what each step takes, and its tile for a width of heads.

Neither torch nor CUDA is imported here. The kernels are csrc/cuda/step*.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention_ext.cuda import tiles
from attention_ext.cuda.tiles import Tile, Tiles
from attention_ext.parts import Dtype

WIDEST = 256  # the largest d
MOST_ROWS = 2**31 - 1024  # of queries or keys; the kernels count them in 32 bits, up to a tile further
ALL = (Dtype.FP32, Dtype.BF16, Dtype.FP16)
HALVES = (Dtype.BF16, Dtype.FP16)
FORMATS = {Dtype.FP32: 0, Dtype.BF16: 1, Dtype.FP16: 2}  # csrc/cuda/call.h has them too


@dataclass(frozen=True)
class Step:
    """A kernel.

    name: what --step takes. file: in csrc/cuda/. fp32_file: that of float32, where it has its own.
    kernels: the functions there.
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
    tiles: Tiles
    dtypes: tuple[Dtype, ...] = ALL
    multiple: int = 1
    vectors: bool = False
    capability: tuple[int, int] = (7, 5)
    only: bool = False
    fp32_file: str = ""

    def source(self, dtype: Dtype) -> str:
        """The file that is compiled for a dtype."""
        return self.fp32_file if self.fp32_file and dtype is Dtype.FP32 else self.file

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run the kernel."""
        return capability >= self.capability and not (self.only and capability[0] != self.capability[0])

    def padded(self, d: int) -> int:
        """The width of the heads that the kernel is compiled for."""
        return -(-d // self.multiple) * self.multiple

    def tile(self, d: int, dtype: Dtype, shared: int, queries: int = 1024) -> Tile:
        """The tile for so many queries of width d, where a block may have so many bytes of shared memory.

        Raises ValueError if the least tile needs more.
        """
        fitting = list(self.tiles(self.padded(d), dtype, queries))
        for tile in fitting:
            if tile.shared <= shared:
                return tile
        raise ValueError(
            f"step is {self.name!r}; with d = {d} it needs {min(t.shared for t in fitting)} bytes of shared "
            f"memory, and this GPU gives a block {shared}; choose another step"
        )


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
            tiles.step1,
        ),
        Step(
            "2-unpadded",
            "step2.cu",
            ("attention_step2",),
            "step 2 without padding",
            "Rows of a tile are d numbers apart, so a column of 32 rows is in few banks of shared memory, "
            "which serve one row after the other.",
            tiles.step2(0),
        ),
        Step(
            "2",
            "step2.cu",
            ("attention_step2",),
            "one launch, tiles in shared memory, 4 x 4 scores a thread",
            "The state stays in the block, and each number from shared memory serves four products. Shared "
            "memory still delivers less than the arithmetic needs.",
            tiles.step2(1),
        ),
        Step(
            "3-shared",
            "step3.cu",
            ("attention_step3",),
            "a row for each thread, the state in shared memory",
            "Each strip of keys reads and writes the row of O in shared memory.",
            tiles.step3("shared"),
        ),
        Step(
            "3-spilled",
            "step3.cu",
            ("attention_step3",),
            "a row for each thread, the state in local arrays that spill",
            "The source is step 3's; with few registers allowed, the arrays go to local memory, which is "
            "global memory behind the L1 cache. More blocks are resident, and they are slower.",
            tiles.step3("spilled"),
        ),
        Step(
            "3",
            "step3.cu",
            ("attention_step3",),
            "a row for each thread, the state in registers",
            "A warp reads each number of K and V once for 32 rows, and no weights pass between threads.",
            tiles.step3("registers"),
        ),
        Step(
            "4",
            "step4.cu",
            ("attention_step4",),
            "float32 by register tiles, vector loads and asynchronous copies",
            "A thread has 8 x 8 scores, so a number from shared memory serves eight products, and the next "
            "tiles arrive meanwhile. Most instructions are multiply-adds.",
            tiles.step4,
            dtypes=(Dtype.FP32,),
            multiple=4,
            vectors=True,
            capability=(8, 0),
        ),
        Step(
            "5",
            "step5_16bit.cu",
            ("attention_step5",),
            "tensor cores with mma.sync, float32 as three products of tf32",
            "The tensor cores compute the products. The softmax, most of which runs beside them, and shared "
            "memory are what is left.",
            tiles.step5,
            multiple=8,
            vectors=True,
            capability=(8, 0),
            fp32_file="step5_tf32.cu",
        ),
        Step(
            "6",
            "step6.cu",
            ("attention_step6",),
            "Hopper: the copy engine, asynchronous products, warps of two roles",
            "One thread starts the copies of tiles while other warps multiply, and the softmax of one tile "
            "runs beside the products of another. The tensor cores bound wide heads, the exponentials narrow "
            "ones.",
            tiles.step6,
            dtypes=HALVES,
            multiple=8,
            vectors=True,
            capability=(9, 0),
            only=True,
        ),
        Step(
            "split",
            "split.cu",
            ("attention_split", "attention_merge"),
            "few queries: the keys are split among blocks and the results merged by logsumexp",
            "A block for each tile of queries would leave most of the GPU idle. Blocks for spans of keys use "
            "all of it and read K and V once. The memory's bandwidth is the bound.",
            tiles.split,
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


def default(d: int, dtype: Dtype, capability: tuple[int, int], shared: int, few: bool = False) -> Step:
    """The fastest step for heads of width d on a GPU of this capability and shared memory for a block.

    few: as few_queries() finds. Raises ValueError if there is none.
    """
    for name in ("split", *FASTEST) if few else FASTEST:
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


def few_queries(queries: int, keys: int, heads: int, multiprocessors: int) -> bool:
    """Whether splitting the keys is faster: tiles of queries would be nearly empty, or too few.

    heads: of all batches. On an H200 four queries a head, or eight in fewer heads than half of its
    multiprocessors, read K and V at a third or more of the memory's bandwidth.
    """
    most = 4 if 2 * heads > multiprocessors else MOST_SPLIT
    return queries <= most and keys >= FEWEST_KEYS


def spans(rows: int, keys: int, step: int, slots: int) -> int:
    """Into how many spans the split step cuts the keys, so that all of the GPU has work.

    rows: blocks for one span. step: keys that a block takes at a time. slots: blocks that run at once.
    More waves of blocks fill the last one better, and cost more merging.
    """
    most = max(1, keys // step)
    best, chosen = -1.0, 1
    for waves in range(1, MOST_WAVES + 1):
        count = min(most, max(1, waves * slots // rows))
        used = rows * count / (-(-rows * count // slots) * slots) - WAVE_COST * waves
        if used > best + 1e-9:
            best, chosen = used, count
    return chosen


# The fastest first, in every dtype at (100, 1, 4096, 32) on an H200 (gpt.py bench --device cuda).
FASTEST = ("6", "5", "4", "3", "2", "1")
MOST_SPLIT = 16  # queries that the split step takes by default
FEWEST_KEYS = 512  # with fewer, one launch is faster than two
MOST_WAVES, WAVE_COST = 8, 0.02
