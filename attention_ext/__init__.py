"""Five implementations of attention behind one door.

PARTS is the table that the command line, the tests and the benchmarks iterate over; attention() runs
one of its rows. torch is imported, and the extension compiled, on first use: `gpt.py --help` needs
neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

from attention_ext import tiles

if TYPE_CHECKING:
    from torch import Tensor


__version__ = "0.1.0"


class BuildError(RuntimeError):
    """The extension could not be compiled or loaded; the message says what to do."""


@dataclass(frozen=True)
class Part:
    """One implementation: its name, the lab's title, a summary, its operator, whether it takes tiles."""

    name: str
    title: str
    summary: str
    operator: str | None = None  # in torch.ops.attention_ext_<simd>; None is PyTorch itself
    tiled: bool = False


PARTS = {
    part.name: part
    for part in (
        Part("part0", "PYTORCH ATTENTION", "matmul, softmax, matmul in PyTorch"),
        Part("part1", "NAIVE ATTENTION", "the textbook's three passes", "part1_naive"),
        Part(
            "part2",
            "BLOCKED MATMUL + UNFUSED SOFTMAX",
            "three passes, both products blocked to the cache",
            "part2_blocked",
        ),
        Part("part3", "FUSED ATTENTION", "one row of scores at a time, all threads", "part3_fused"),
        Part("part4", "FLASH ATTENTION", "tiles with an online softmax", "part4_flash", tiled=True),
    )
}

# The SIMD helpers under parts 1 to 4. 'auto' is the faster: portable C++, some percent ahead of ISPC in parts
# 3 and 4 (benchmarks/attention.py --simd ispc,portable).
SIMD = ("auto", "ispc", "portable", "off")
AUTO = "portable"

MOST_SCORES = 2**50  # of a head, so that scratch for them can be counted; expanded tensors may ask for more


@overload
def attention(
    part: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    br: int | None = ...,
    bc: int | None = ...,
    simd: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    part: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    br: int | None = ...,
    bc: int | None = ...,
    simd: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    part: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    br: int | None = None,
    bc: int | None = None,
    simd: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v by one of PARTS.

    part: 'part0' to 'part4'. q: (B, H, Nq, d). k, v: (B, H, Nk, d). All float32 on the CPU, with any
    strides and no empty dimension.
    causal: query i sees the keys j <= i + (Nk - Nq); Nq must be at most Nk. Nq Nk must be below 2^50.
    scale: multiplies the scores; 1/sqrt(d) unless given.
    br, bc: part4's tile, in queries and keys, of at least 1; None takes what `gpt.py bench --tune` found for
    this case on this machine, else one default. The other parts have no tile and ignore them.
    simd: one of SIMD, the helpers under the kernels; 'off' are plain loops. part0 has none.
    Gives the output, (B, H, Nq, d), contiguous; with return_lse also the logarithm of each row's
    normaliser, m + log(l), (B, H, Nq), from which results over parts of the keys can be merged.

    A NaN reaches the rows that see it and no others. Parts 1 to 4 compute no gradients.
    Raises TypeError for arguments of a wrong type, ValueError for wrong shapes and values, and
    BuildError where the extension cannot be compiled; each names what was wrong.
    """
    import torch

    _check_options(part, scale, br, bc, simd)
    compiling = torch.compiler.is_compiling()
    if compiling or not _sound(q, k, v, causal):
        _check_tensors(part, q, k, v, causal)
    _, _, Nk, d = k.shape
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    if PARTS[part].operator is None:
        from attention_ext import reference

        return reference.attention(q, k, v, causal=causal, scale=scale, return_lse=return_lse)
    tile: tuple[int, ...] = ()
    if PARTS[part].tiled:
        tuned = tiles.DEFAULT
        if not (br and bc or compiling):  # a graph cannot read files
            tuned = tiles.tile(AUTO if simd == "auto" else simd, torch.get_num_threads(), d, Nk, causal)
        tile = (br or tuned[0], bc or tuned[1])
    out, lse = operator(part, simd)(q, k, v, causal, scale, return_lse, *tile)
    return (out, lse) if return_lse else out


_operators: dict[tuple[str, str], Callable] = {}


def operator(part: str, simd: str = "auto") -> Callable:
    """The PyTorch operator of one of parts 1 to 4; compiles the extension on first use."""
    if (part, simd) not in _operators:  # a table: torch.compile can follow a look-up but not a build
        from attention_ext import build

        _operators[part, simd] = getattr(build.load(simd), str(PARTS[part].operator)).default
    return _operators[part, simd]


def _check_options(part, scale, br, bc, simd) -> None:
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it must be one of {', '.join(PARTS)}")
    if simd not in SIMD:
        raise ValueError(f"simd is {simd!r}; it must be one of {', '.join(SIMD)}")
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number")
    for name, size in (("br", br), ("bc", bc)):
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} is a {type(size).__name__}; it must be a whole number")
        if not 1 <= size < 2**63:
            raise ValueError(f"{name} is {size}; it must be at least 1 and fit 63 bits")


def _sound(q, k, v, causal) -> bool:
    """Whether _check_tensors() has nothing to say, told in a third of its time, which short calls notice."""
    import torch

    try:
        (B, H, Nq, d), (_, _, Nk, _) = q.shape, k.shape
        return bool(
            type(q) is type(k) is type(v) is torch.Tensor
            and q.dtype is k.dtype is v.dtype is torch.float32
            and q.is_cpu and k.is_cpu and v.is_cpu
            and k.shape == (B, H, Nk, d) == v.shape
            and 0 < B * H * d * Nq * Nk and Nq * Nk < MOST_SCORES
            and not (causal and Nq > Nk)
            and not (q.requires_grad or k.requires_grad or v.requires_grad)
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError):
        return False


def _check_tensors(part, q, k, v, causal) -> None:
    import torch

    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor")
        if t.dtype != torch.float32:
            raise TypeError(f"{name} is {t.dtype}; it must be torch.float32")
        if not t.is_cpu:
            raise ValueError(f"{name} is on {t.device}; it must be on the CPU")
        if t.dim() != 4 or t.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must be (B, H, N, d), no dimension empty"
            )
    B, H, Nq, d = q.shape
    Nk = k.shape[2]
    if k.shape != (B, H, Nk, d):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; it must be ({B}, {H}, Nk, {d}), as q is {tuple(q.shape)}"
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be k's, {tuple(k.shape)}")
    if causal and Nq > Nk:
        raise ValueError(f"q has Nq={Nq} rows; with causal=True it must have at most Nk={Nk}")
    if Nq * Nk >= MOST_SCORES:
        raise ValueError(f"q has Nq={Nq} and k Nk={Nk} rows; their product must be below 2^50")
    if PARTS[part].operator and torch.is_grad_enabled():
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.requires_grad:
                raise ValueError(f"{name} requires a gradient; {part} computes none, only part0 does")
