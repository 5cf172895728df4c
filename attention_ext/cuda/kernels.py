"""The table of part 4's CUDA kernels: what each takes, its tiles, its sources, how it is launched.

Neither torch nor CUDA is imported here.
"""

from dataclasses import replace
from functools import partial

from shakespeare.attention_ext.cuda import launches, tiles
from shakespeare.attention_ext.cuda.launches import Gpu, Kernel, Sizes
from shakespeare.attention_ext.cuda.tiles import LARGE, Queries, Tile
from shakespeare.attention_ext.parts import Dtype, one_of

HALVES = (Dtype.BF16, Dtype.FP16)
WIDEST = 256  # the largest d
MOST_ROWS = 2**31 - 1024  # of queries or keys; the kernels count them in 32 bits, up to a tile further


KERNELS = {
    kernel.name: replace(kernel, functions=kernel.functions or (f"attention_kernel{kernel.name[0]}",))
    for kernel in (
        Kernel(
            "1",
            dict.fromkeys(Dtype, "kernel1.cu"),
            "one launch for each tile of keys, the state in global memory",
            "Every launch reads and writes the state of all rows, and loads the queries again; at d = 32 a "
            "warp's reads of K are all in one bank of shared memory.",
            tiles.kernel1,
            launches.for_each_tile_of_keys,
        ),
        Kernel(
            "2-unpadded",
            dict.fromkeys(Dtype, "kernel2.cu"),
            "kernel 2 without padding",
            "Rows of a tile are d numbers apart, so a column of 32 rows is in few banks of shared memory, "
            "which serve one row after the other.",
            tiles.kernel2(0),
        ),
        Kernel(
            "2",
            dict.fromkeys(Dtype, "kernel2.cu"),
            "one launch, tiles in shared memory, 4 x 4 scores a thread",
            "The state stays in the block, and each number from shared memory serves four products. Shared "
            "memory still delivers less than the arithmetic needs.",
            tiles.kernel2(1),
        ),
        Kernel(
            "3-shared",
            dict.fromkeys(Dtype, "kernel3.cu"),
            "a row for each thread, the state in shared memory",
            "Each strip of keys reads and writes the row of O in shared memory.",
            tiles.kernel3("shared"),
        ),
        Kernel(
            "3-spilled",
            dict.fromkeys(Dtype, "kernel3.cu"),
            "a row for each thread, the state in local arrays that spill",
            "The source is kernel 3's; with few registers allowed, the arrays go to local memory, which is "
            "global memory behind the L1 cache. More blocks are resident, and they are slower.",
            tiles.kernel3("spilled"),
        ),
        Kernel(
            "3",
            dict.fromkeys(Dtype, "kernel3.cu"),
            "a row for each thread, the state in registers",
            "A warp reads each number of K and V once for 32 rows, and no weights pass between threads.",
            tiles.kernel3("registers"),
        ),
        Kernel(
            "4",
            {Dtype.FP32: "kernel4.cu"},
            "float32 by register tiles, vector loads and asynchronous copies",
            "A thread has 8 x 8 scores, so a number from shared memory serves eight products, and the next "
            "tiles arrive meanwhile. Most instructions are multiply-adds.",
            tiles.kernel4,
            multiple=4,
            ruled=True,
        ),
        Kernel(
            "5",
            {Dtype.FP32: "kernel5_tf32.cu", **dict.fromkeys(HALVES, "kernel5_16bit.cu")},
            "tensor cores with mma.sync, float32 as three products of tf32",
            "The tensor cores compute the products. The softmax, most of which runs beside them, and shared "
            "memory are what is left.",
            tiles.kernel5,
            multiple=8,
            capability=(8, 0),
            ruled=True,
            earlier={Dtype.FP16: (7, 5)},
        ),
        Kernel(
            "6",
            dict.fromkeys(HALVES, "kernel6.cu"),
            "Hopper: the copy engine, asynchronous products, warps of two roles",
            "One thread starts the copies of tiles while other warps multiply, and the softmax of one tile "
            "runs beside the products of another. The tensor cores bound wide heads, the exponentials narrow "
            "ones.",
            tiles.kernel6,
            launches.persistent,
            multiple=8,
            capability=(9, 0),
            only=True,
            ruled=True,
        ),
        Kernel(
            "split",
            dict.fromkeys(Dtype, "split.cu"),
            "few queries: the keys are split among blocks and the results merged by logsumexp",
            "A block for each tile of queries would leave most of the GPU idle. Blocks for splits of the "
            "keys use all of it and read K and V once. The memory's bandwidth is the bound.",
            tiles.split,
            launches.split,
            functions=("attention_split", "attention_merge"),
            multiple=8,
            ruled=True,
        ),
    )
}

# The backward pass's; the best first.
OF_BACKWARD = ("attention_backward_rows", "attention_backward_keys", "attention_backward_queries")
_backward = partial(Kernel, plan=launches.backward, functions=OF_BACKWARD, ruled=True)
_with_mma = partial(_backward, tiles=tiles.on_tensor_cores, multiple=8, capability=(8, 0))
BACKWARD = {
    kernel.name: kernel
    for kernel in (
        _backward(
            "backward4",
            dict.fromkeys(HALVES, "backward4.cu"),
            "Hopper: the copy engine, asynchronous products, warps of three roles",
            "The tensor cores compute five products, as tiles of keys add to dQ in turns, or for wide heads "
            "tiles of queries to dK and dV. No unit is busy all the time: few warps wait for each other's "
            "numbers.",
            tiles=tiles.backward4,
            plan=launches.added_in_turns,
            multiple=8,
            capability=(9, 0),
            only=True,
            without=launches.RULES["BIAS_GRADIENT"],
        ),
        _with_mma(
            "backward3",
            dict.fromkeys(HALVES, "backward3.cu"),
            "tensor cores with mma.sync, P and dS in registers as the products' left operands",
            "The tensor cores compute all seven products. They and shared memory are the bound.",
        ),
        _with_mma(
            "backward2",
            {Dtype.FP32: "backward2.cu"},
            "tensor cores with mma.sync, three products of tf32",
            "Each of the seven products is three of tf32. They and the splitting are the bound.",
        ),
        _backward(
            "backward1",
            dict.fromkeys(Dtype, "backward1.cu"),
            "tiles in shared memory, float32 arithmetic",
            "A number from shared memory serves up to four products, and shared memory is the bound.",
            tiles=tiles.backward1,
        ),
    )
}


EVERY = KERNELS | BACKWARD
# Launched before those that take the rule `documents`.
DOCUMENTS = Kernel(
    "documents",
    {Dtype.FP32: "documents.cu"},
    "where each key's document begins and ends",
    "",
    tiles.documents,
    launches.for_each_key,
    functions=("attention_documents",),
)
GRADIENT = "backward"  # in place of a name: the best of BACKWARD


def check_kernel(kernel: str, rules: int = 0) -> Kernel:
    """The row with this name. Raises ValueError if there is none, or if it does not take the rules."""
    one_of("kernel", kernel, EVERY)
    if not EVERY[kernel].takes(rules):
        able = ", ".join(name for name, row in KERNELS.items() if row.ruled)
        where = "with rules, or fewer heads of k and v than of q"
        raise ValueError(f"kernel is {kernel!r}; {where}, it must be one of {able}")
    return EVERY[kernel]


def choose(
    kernel: str | None, d: int, dtype: Dtype, on: Gpu, queries: Queries = LARGE, rules: int = 0
) -> tuple[Kernel, Tile]:
    """The kernel with this name, or the fastest one for None, and its tile for so many queries of width d.

    kernel: may be GRADIENT. rules: a sum of launches.RULES. Raises ValueError if the kernel, or no kernel,
    takes them on this GPU.
    """
    if kernel not in (None, GRADIENT):
        row = check_kernel(kernel, rules)
        return row, row.tile(d, dtype, on, queries)
    names: tuple[str, ...] = FASTEST
    if kernel == GRADIENT:
        names = tuple(BACKWARD)
    elif queries.few:
        names = ("split", *FASTEST)
    elif d <= 32 and queries.share <= tiles.SMALL:
        names = ("5", *FASTEST)
    for row in (EVERY[name] for name in names):
        try:
            if row.takes(rules):
                return row, row.tile(d, dtype, on, queries)
        except ValueError:
            continue
    major, minor = on.capability
    ruled = " with rules" if rules else ""
    raise ValueError(
        f"no kernel{ruled} takes d = {d} on this GPU, of compute capability {major}.{minor} "
        f"with {on.shared} bytes of shared memory for a block"
    )


def queries_of(call: Sizes, dtype: Dtype, on: Gpu, rules: int = 0) -> Queries:
    """What decides a call's kernel and tile. Splitting the keys is for tiles nearly empty, or too few.

    Above half of an H100's multiprocessors, kernel 6 is as fast for 5 to 16 queries.
    """
    many = 2 * (call.heads // call.group) > on.multiprocessors and dtype is not Dtype.FP32
    few = call.Nq <= (4 if many else MOST_SPLIT) and call.Nk >= FEWEST_KEYS
    share = call.heads * call.Nq // on.multiprocessors
    return Queries(call.Nq * call.group, share, few, modified=rules >= launches.RULES["BIAS_ADDS"])


# The fastest first, in every dtype at (100, 1, 4096, 32) on an H200 (gpt.py bench --device cuda).
FASTEST = ("6", "5", "4", "3", "2", "1")
MOST_SPLIT = 16  # queries for which the keys are split by default
FEWEST_KEYS = 512  # with fewer, one launch is faster than two
