"""The table of implementations. Everything that needs a part iterates over PARTS.

Its C++ side is csrc/parts.h. torch is not imported here, because `gpt.py --help` needs only the table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BuildError(RuntimeError):
    """The extension could not be compiled or loaded; the message says what to do."""


class Dtype(enum.StrEnum):
    """The format of attention's inputs and output."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def torch_name(self) -> str:
        """PyTorch's name for it."""
        return {"fp32": "float32", "bf16": "bfloat16"}[self.value]


@dataclass(frozen=True)
class Part:
    """One implementation of attention.

    title: its name in the lab. summary: the algorithm in a few words. why: the reasons for its cost.
    operator: the name of its row in csrc/parts.h, of its file in csrc/cpu/ and of its PyTorch operator;
    None for PyTorch itself.
    tiled: takes br and bc. threaded: uses all threads.
    devices, dtypes: those that its tensors may have, by PyTorch's names.
    """

    name: str
    title: str
    summary: str
    why: str = ""
    operator: str | None = None
    tiled: bool = False
    threaded: bool = True
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)


PARTS = {
    part.name: part
    for part in (
        Part(
            "part0",
            "PYTORCH ATTENTION",
            "matmul, softmax, matmul in PyTorch",
            "PyTorch multiplies, normalises and multiplies again; each step writes N x N numbers for every "
            "head and the next one reads them.",
            dtypes=("float32", "bfloat16"),
        ),
        Part(
            "part1",
            "NAIVE ATTENTION",
            "the textbook's three passes",
            "Each query passes all of K, and each number of the output is a sum down a column of V: one "
            "number of every cache line is used, and the line has gone before the next one is wanted if V "
            "does not fit; each addition waits for the one before it; and only one lane of a vector works.",
            operator="part1_naive",
            threaded=False,
        ),
        Part(
            "part2",
            "BLOCKED MATMUL + UNFUSED SOFTMAX",
            "three passes, both products blocked to the cache",
            "The same three passes, but a tile of K or V serves 96 queries before it goes, and V is read "
            "along its rows. What is left is the N x N matrix of scores, written once and read twice.",
            operator="part2_blocked",
            threaded=False,
        ),
        Part(
            "part3",
            "FUSED ATTENTION",
            "one row of scores at a time, all threads",
            "One row of scores at a time: it never leaves the cache, and the N x N matrix is gone. The "
            "price is that every query passes all of K and V again.",
            operator="part3_fused",
        ),
        Part(
            "part4",
            "FLASH ATTENTION",
            "tiles with an online softmax",
            "A tile of Br queries shares each pass over K and V, and of the scores only a strip exists, "
            "which stays in the nearest caches. Nothing but Q, K, V and the output has to come from memory.",
            operator="part4_flash",
            tiled=True,
            dtypes=("float32", "bfloat16"),
        ),
    )
}

# The SIMD helpers under the kernels. 'auto' is portable C++, some percent faster than ISPC in parts 3 and 4
# (gpt.py bench part3,part4 --simd ispc,portable).
SIMD = ("auto", "ispc", "portable", "off")
AUTO = "portable"

# Of a head, as csrc/bindings/operators.cpp has it, so that the kernels' scratch can be counted.
MOST_SCORES = 2**50


class Precision(enum.StrEnum):
    """The format of the decoder's weight matrices; the rows of csrc/matmul/precision.h.

    INT8 has a float32 scale for each output and group of inputs.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class CachePrecision(enum.StrEnum):
    """The format of the cached keys and values; the rows of csrc/cache_precision.h."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def bytes(self) -> int:
        """The bytes of a number."""
        return {CachePrecision.FP32: 4, CachePrecision.BF16: 2}[self]


def check_part(part: str) -> Part:
    """The row of a part. Raises ValueError for a name that is not in PARTS."""
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it must be one of {', '.join(PARTS)}")
    return PARTS[part]


def check_dtype(part: str, dtype: str) -> Dtype:
    """The Dtype of this value. Raises ValueError if there is none or the part does not take it."""
    if dtype not in list(Dtype):
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(Dtype)}")
    found = Dtype(dtype)
    check_part(part)
    if part not in taking(found):
        raise ValueError(f"dtype is {dtype!r}; {part} does not take it, only {', '.join(taking(found))}")
    return found


def taking(dtype: Dtype) -> tuple[str, ...]:
    """The parts that take a dtype."""
    return tuple(name for name, part in PARTS.items() if dtype.torch_name in part.dtypes)


def resolve_simd(simd: str) -> str:
    """The helpers that `simd`, one of SIMD, stands for. Raises ValueError for another name."""
    if simd not in SIMD:
        raise ValueError(f"simd is {simd!r}; it must be one of {', '.join(SIMD)}")
    return AUTO if simd == "auto" else simd


def helpers_of(part: str, simd: str) -> str | None:
    """The SIMD helpers that a part uses; None for part0, which uses none."""
    return None if check_part(part).operator is None else resolve_simd(simd)
