"""The table of implementations. Everything that needs a part iterates over PARTS.

Its C++ side is csrc/parts.h. It imports no torch: `gpt.py --help` needs only the table.
"""

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BuildError(RuntimeError):
    """The extension could not be compiled or loaded; the message says what to do.

    output: what a compiler wrote about a mistake in a source, with colours if stderr is a terminal.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Dtype(enum.StrEnum):
    """The format of attention's inputs and output."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def torch_name(self) -> str:
        """PyTorch's name for it."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.value]

    @property
    def bytes(self) -> int:
        """The bytes of a number."""
        return 4 if self is Dtype.FP32 else 2

    @staticmethod
    def of(torch_dtype: object) -> "Dtype":
        """The Dtype of a PyTorch dtype or its name. Raises ValueError if there is none."""
        known = {dtype.torch_name: dtype for dtype in Dtype}
        name = str(torch_dtype).removeprefix("torch.")
        one_of("dtype", name, known)
        return known[name]


@dataclass(frozen=True)
class Part:
    """One implementation of attention.

    title: its name in the lab. why: the reasons for its cost. operator: its row in csrc/parts.h, its file in
    csrc/cpu/ and its PyTorch operator; None for PyTorch itself. gradient: its operator with a gradient, for
    float32 on the CPU. tiled: takes br and bc. threaded: uses all threads. dtypes: its tensors' on each kind
    of device, by PyTorch's names.
    file, attend: of a user's part, its file and the function of q, k, v, causal and scale that computes it.
    """

    name: str
    title: str
    summary: str
    why: str = ""
    operator: str | None = None
    gradient: str | None = None
    tiled: bool = False
    threaded: bool = True
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"cpu": ("float32",)})
    file: Path | None = None
    attend: Callable[..., Any] | None = field(default=None, compare=False)


# The kinds of device, by PyTorch's names. Tensors are on the CPU or CUDA; WebGPU takes them from the CPU.
DEVICES = {"cpu": "the CPU", "cuda": "CUDA", "webgpu": "WebGPU"}
WITH_CUDA = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
PARTS = {
    part.name: part
    for part in (
        Part(
            "part0",
            "PYTORCH ATTENTION",
            "matmul, softmax, matmul in PyTorch",
            "Two matrix products with a softmax between them: each of the first two steps writes N x N "
            "numbers for every head, and the next one reads them.",
            dtypes=WITH_CUDA,
        ),
        Part(
            "part1",
            "NAIVE ATTENTION",
            "the textbook's three passes",
            "Each query reads all of K. Each number of the output is a sum down a column of V: if V does "
            "not fit in a cache, each cache line is evicted after one float is used. Each addition waits "
            "for the one before it, and only one SIMD lane works.",
            operator="part1_naive",
            threaded=False,
        ),
        Part(
            "part2",
            "BLOCKED MATMUL + UNFUSED SOFTMAX",
            "three passes, both products blocked to the cache",
            "The same three passes, but a tile of K or V serves 96 queries before it is evicted, and V is "
            "read along its rows. What is left is the N x N matrix of scores, written once and read twice.",
            operator="part2_blocked",
            threaded=False,
        ),
        Part(
            "part3",
            "FUSED ATTENTION",
            "one row of scores at a time, all threads",
            "One row of scores at a time: it stays in cache, and no N x N matrix is stored. In return, "
            "every query reads all of K and V again.",
            operator="part3_fused",
        ),
        Part(
            "part4",
            "FLASH ATTENTION",
            "tiles with an online softmax",
            "A tile of Br queries shares each pass over K and V. Only a strip of the scores exists at a "
            "time, and it stays in the L1 and L2 caches. Only Q, K, V and the output move to and from "
            "memory.",
            operator="part4_flash",
            gradient="part4_with_gradient",
            tiled=True,
            dtypes=WITH_CUDA | {"webgpu": ("float32", "float16")},
        ),
    )
}

SUFFIXES = (".cpp", ".ispc", ".cu", ".py")  # of users' files
# Makes the Part of a user's file, by its path. The package sets it: this file imports no other.
part_of_file: Callable[[str], Part] = PARTS.__getitem__

# The SIMD helpers under the kernels; 'auto' is portable C++.
SIMD = ("auto", "ispc", "portable", "off")
AUTO = "portable"

# Nq * Nk of a call is below this: the size of its scratch fits 63 bits. The build gives it to the operators.
MOST_SCORES = 2**50


class Precision(enum.StrEnum):
    """The format of the decoder's weights (model/csrc/precision.h). INT8 has a scale per output and group."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class CachePrecision(enum.StrEnum):
    """The format of the cached keys and values; the rows of attention_ext/csrc/attention.h."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def bytes(self) -> int:
        """The bytes of a number."""
        return Dtype(self).bytes


def one_of(name: str, value: str, known: Collection[str]) -> None:
    """Raise ValueError, naming the argument, unless its value is one of the known ones."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def is_file(part: str) -> bool:
    """Whether a part's name is that of a user's file, by its suffix."""
    return isinstance(part, str) and part.endswith(SUFFIXES)


def check_part(part: str | Part) -> Part:
    """The row of a part, or of a user's file; a Part as it is. Raises ValueError for another name."""
    if isinstance(part, Part):
        return part
    if is_file(part):
        return part_of_file(part)
    one_of("part", part, PARTS)
    return PARTS[part]


def check_dtype(part: str, dtype: str, device: str = "cpu") -> Dtype:
    """The Dtype with this value. Raises ValueError if a name is unknown or the part does not take it."""
    one_of("device", device, DEVICES)
    one_of("dtype", dtype, list(Dtype))
    row, known, where = check_part(part), Dtype(dtype), f"on {DEVICES[device]}"
    if known.torch_name in row.dtypes.get(device, ()):
        return known
    if row.file:
        takes = " and ".join(f"fp32 on {DEVICES[device]}" for device in row.dtypes)
        raise ValueError(f"dtype is {known.value!r} {where}; {part} takes {takes}")
    if not (who := taking(known, device)):
        raise ValueError(f"dtype is {known.value!r}; no part takes it {where}")
    where = "" if device == "cpu" else f" {where}"
    raise ValueError(f"dtype is {known.value!r}; {part} does not take it{where}, only {', '.join(who)}")


def taking(dtype: Dtype, device: str = "cpu") -> tuple[str, ...]:
    """The parts that take a dtype on a kind of device of DEVICES."""
    return tuple(name for name, part in PARTS.items() if dtype.torch_name in part.dtypes.get(device, ()))


def running_on(device: str) -> tuple[str, ...]:
    """The parts that run on a kind of device of DEVICES."""
    return tuple(name for name, part in PARTS.items() if device in part.dtypes)


def with_gradient() -> tuple[str, ...]:
    """The parts that compute gradients in float32 on the CPU."""
    return tuple(name for name, part in PARTS.items() if part.operator is None or part.gradient)


def resolve_simd(simd: str) -> str:
    """The helpers that `simd`, one of SIMD, stands for. Raises ValueError for another name."""
    one_of("simd", simd, SIMD)
    return AUTO if simd == "auto" else simd


def helpers_of(part: str, simd: str) -> str | None:
    """The SIMD helpers that a part uses; None for part0, which uses none."""
    return None if check_part(part).operator is None else resolve_simd(simd)
