"""The table of implementations, and what goes together: compatible(). What needs a part iterates over PARTS.

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
    def torch_dtype(self) -> Any:
        """PyTorch's dtype."""
        import torch

        return getattr(torch, self.torch_name)

    @property
    def bytes(self) -> int:
        """The bytes of a number."""
        return 4 if self is Dtype.FP32 else 2

    @property
    def rounding(self) -> float:
        """How far correct results may be rounded apart in 16 bits, as a share of the largest; 0 in fp32."""
        return {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}[self.value]

    @classmethod
    def parse(cls, dtype: object) -> "Dtype":
        """The Dtype of its name, or of PyTorch's dtype or its name. Raises ValueError if there is none."""
        name = str(dtype).removeprefix("torch.")
        name = {each.torch_name: each.value for each in cls}.get(name, name)
        one_of("dtype", name, list(cls))
        return cls(name)


Dtypes = Mapping[str, tuple[str, ...]]  # PyTorch's names of dtypes for each kind of device
ON_CPU: Dtypes = {"cpu": ("float32",)}


@dataclass(frozen=True, eq=False)
class Part:
    """One implementation of attention.

    title: its name in the lab. why: the reasons for its cost. operator: its row in csrc/parts.h, its file in
    csrc/cpu/ and its PyTorch operator; None for PyTorch itself. gradient: its operator with a gradient, for
    float32 on the CPU. tiled: takes br and bc. threaded: uses all threads.
    dtypes, gradients, ruled: the dtypes of its tensors, those with gradients, and those with rules.
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
    dtypes: Dtypes = field(default_factory=lambda: ON_CPU)
    gradients: Dtypes = field(default_factory=dict)
    ruled: Dtypes = field(default_factory=lambda: ON_CPU)
    file: Path | None = None
    attend: Callable[..., Any] | None = None


# The kinds of device, by PyTorch's names. Tensors are on the CPU or CUDA; WebGPU takes them from the CPU.
DEVICES = {"cpu": "the CPU", "cuda": "CUDA", "webgpu": "WebGPU"}
WITH_CUDA: Dtypes = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
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
            gradients=WITH_CUDA,
            ruled=WITH_CUDA,
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
            dtypes={**WITH_CUDA, "webgpu": ("float32", "float16")},
            gradients={**WITH_CUDA, **ON_CPU},
            ruled={**WITH_CUDA, **ON_CPU},
        ),
    )
}

SUFFIXES = (".cpp", ".ispc", ".cu", ".py")  # of users' files

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
    if isinstance(part, str) and part in PARTS:
        return PARTS[part]
    if isinstance(part, Part):
        return part
    if is_file(part):
        from shakespeare.attention_ext import user_kernel  # imports NumPy, which only users' files need

        return user_kernel.row(part)
    one_of("part", part, PARTS)
    return PARTS[part]


def able(device: str = "cpu", dtype: Dtype = Dtype.FP32, gradient: bool = False) -> tuple[str, ...]:
    """The parts that take a dtype on a kind of device, or those that also compute gradients there."""
    table = "gradients" if gradient else "dtypes"
    return tuple(
        name for name, row in PARTS.items() if dtype.torch_name in getattr(row, table).get(device, ())
    )


def compatible(
    part: str | Part,
    device: str = "cpu",
    dtype: object = Dtype.FP32,
    gradient: bool = False,
    rules: tuple[str, ...] = (),
    kernel: str | None = None,
    br: int | None = None,
    bc: int | None = None,
    simd: str = "auto",
) -> str | None:
    """Why these do not go together: a sentence that names the first wrong argument. None if they do.

    dtype: a Dtype, or PyTorch's, or a name of either. gradient: whether gradients are computed. rules: the
    names of attention's rules. Raises ValueError for an unknown part, device or dtype.
    """
    one_of("device", device, DEVICES)
    row = check_part(part)
    number = Dtype.parse(dtype)
    where = f"on {DEVICES[device]}"
    here = f"with {row.name} {where}"
    taken = [Dtype.parse(name) for name in row.dtypes.get(device, ())]
    if not taken:
        return f"part is {row.name!r}; it must be {' or '.join(able(device))} {where}"
    if number not in taken:
        return f"dtype is {number.value!r}; it must be {' or '.join(taken)} {here}"
    if gradient and number.torch_name not in row.gradients.get(device, ()):
        who = " or ".join(able(device, number, gradient=True))
        if not who:
            return f"device is {device!r}; it must be cpu or cuda for gradients"
        return f"part is {row.name!r}; it must be {who} for gradients in {number} {where}"
    refused = set() if number.torch_name in row.ruled.get(device, ()) else set(rules)
    for rule in rules:
        if rule in refused:
            return f"{rule} is given; it must be left out {here} in {number}"
    if kernel is not None and (device == "cpu" or row.operator is None):
        return f"kernel is {kernel!r}; it must be left out {here}"
    if device != "cpu":
        for name, value, default in (("simd", simd, "auto"), ("br", br, None), ("bc", bc, None)):
            if value != default:
                return f"{name} is {value!r}; it must be left out {where}, which takes none"
    return None


def check_compatible(part: str | Part, device: str = "cpu", dtype: object = Dtype.FP32, **more: Any) -> Dtype:
    """The Dtype. Raises ValueError with the sentence of compatible(), or as it does."""
    reason = compatible(part, device, dtype, **more)
    if reason:
        raise ValueError(reason)
    return Dtype.parse(dtype)


def resolve_simd(simd: str) -> str:
    """The helpers that `simd`, one of SIMD, stands for. Raises ValueError for another name."""
    one_of("simd", simd, SIMD)
    return AUTO if simd == "auto" else simd


def helpers_of(part: str, simd: str) -> str | None:
    """The SIMD helpers that a part uses; None for part0, which uses none."""
    return None if check_part(part).operator is None else resolve_simd(simd)
