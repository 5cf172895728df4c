"""Five implementations of attention behind one function.

parts.PARTS is the table that the command line, the tests and the benchmarks iterate over; attention() runs
one of its rows. torch is imported, and the extension compiled, on first use, because `gpt.py --help`
needs neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

from attention_ext import tiles
from attention_ext.cuda.steps import MOST_ROWS, WIDEST, check_step
from attention_ext.parts import (
    AUTO,
    DEVICES,
    MOST_SCORES,
    PARTS,
    SIMD,
    BuildError,
    Part,
    check_part,
    resolve_simd,
    with_gradient,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AUTO", "PARTS", "SIMD", "BuildError", "Part", "attention", "operator"]
__version__ = "0.1.0"


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
    step: str | int | None = ...,
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
    step: str | int | None = ...,
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
    step: str | int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v by one of PARTS.

    part: 'part0' to 'part4'. q: (B, H, Nq, d). k, v: (B, H, Nk, d). All float32, in part0 and part4 also all
    bfloat16, on the CPU, with any strides and no empty dimension; in parts 1 to 4 Nq * Nk must be below 2^50.
    part0 and part4 also take tensors on one CUDA device, float32, bfloat16 or float16; part4's d is then at
    most 256, and Nq and Nk below 2^31 - 1023.
    causal: query i sees the keys j <= i + (Nk - Nq); Nq must be at most Nk.
    scale: multiplies the scores; 1/sqrt(d) by default.
    br, bc: part4's tile, in queries and keys, each at least 1. None takes the tile that `gpt.py bench --tune`
    found for this case on this machine, else a default. The other parts ignore br and bc. On CUDA they must
    be None: each step has its own tile.
    simd: one of SIMD, the helpers under the kernels; 'off' uses scalar loops. part0, CUDA and gradients
    ignore it.
    step: part4's kernel on CUDA, by its name in cuda.steps.STEPS or its number; None takes the fastest that
    accepts the tensors. On the CPU it must be None; part0 ignores it on CUDA.
    Returns the output, (B, H, Nq, d), contiguous, in q's dtype; with return_lse also the logsumexp of each
    row, m + log(l), (B, H, Nq), float32. reference.merge() uses it to combine results over disjoint sets of
    keys. Sums and the softmax are float32. With AMX part4 truncates the softmax's weights to bfloat16,
    divides by the sum of the truncated weights, and copies V, so its scratch grows with N.

    A NaN or infinity in q reaches its row only; in a key or value that is seen, the queries that see it; in a
    masked key or value it may reach the rows of the same tile, as in PyTorch. Denormal numbers count as 0.
    part0 and, for float32 on the CPU, part4 compute gradients, also of the logsumexp. part4 uses
    FlashAttention-2, which stores no N x N numbers, and has no second gradients.
    Raises TypeError for arguments of a wrong type, ValueError for wrong shapes and values, each naming the
    argument, and BuildError if the extension or a CUDA kernel cannot be compiled.
    """
    import torch

    row, helpers = check_part(part), resolve_simd(simd)
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number")
    tiles.check_sides(br, bc)
    compiling = torch.compiler.is_compiling()
    if compiling or not _sound(row, q, k, v, causal):
        _check_tensors(row, q, k, v, causal)
    if step is not None or q.is_cuda:
        _check_step(row, q, k, step, br, bc)
    _, _, Nk, d = k.shape
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    if row.operator is None:
        from attention_ext import reference

        return reference.attention(q, k, v, causal=causal, scale=scale, return_lse=return_lse)
    if q.is_cuda:
        chosen = "" if step is None else str(step)
        out, lse = operator(part, "cuda")(q, k, v, causal, scale, return_lse, chosen)
        return (out, lse) if return_lse else out
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tile: tuple[int, ...] = ()
    if row.tiled:
        tuned = tiles.DEFAULT
        if not (br and bc or compiling):  # a compiled graph cannot read files
            queries = q.shape[0] * q.shape[1] * q.shape[2]
            tuned = tiles.tile(helpers, torch.get_num_threads(), d, Nk, causal, queries)
        tile = (br or tuned[0], bc or tuned[1])
    if gradient:  # the backward pass needs the logsumexp
        out, lse = operator(part, helpers, gradient)(q, k, v, causal, scale, *tile)
    else:
        out, lse = operator(part, helpers)(q, k, v, causal, scale, return_lse, *tile)
    return (out, lse) if return_lse else out


_operators: dict[tuple[str, str, bool], Callable] = {}


def operator(part: str, simd: str = "auto", gradient: bool = False) -> Callable:
    """The PyTorch operator of one of parts 1 to 4; compiles the extension on first use.

    simd: one of SIMD, or 'cuda' for part4's operator on CUDA. gradient: part4's with a gradient, on the CPU.
    """
    key = part, simd, gradient
    if key not in _operators:  # torch.compile can trace a look-up in a table but not a build
        if simd == "cuda":
            from attention_ext.cuda import operators

            _operators[key] = operators.flash
        else:
            from attention_ext import extension

            _operators[key] = extension.operator(part, simd, gradient)
    return _operators[key]


def _sound(part: Part, q, k, v, causal: bool) -> bool:
    """Whether _check_tensors() would pass. Takes a third of its time, which matters in short calls.

    The operator checks too, but raises only RuntimeErrors.
    """
    import torch

    try:
        (B, H, Nq, d), (_, _, Nk, _) = q.shape, k.shape
        return bool(
            type(q) is type(k) is type(v) is torch.Tensor
            and q.dtype is k.dtype is v.dtype
            and (q.is_cpu and k.is_cpu and v.is_cpu or q.is_cuda and q.device == k.device == v.device)
            and q.device.type in part.dtypes
            and (q.dtype is torch.float32 or str(q.dtype)[6:] in part.dtypes[q.device.type])
            and k.shape == (B, H, Nk, d) == v.shape
            and 0 < B * H * d * Nq * Nk
            and Nq * Nk < MOST_SCORES
            and not (causal and Nq > Nk)
            and not (q.requires_grad or k.requires_grad or v.requires_grad)
        )
    except (AttributeError, TypeError, ValueError):
        return False


def _check_tensors(part: Part, q, k, v, causal: bool) -> None:
    """Raise TypeError or ValueError, naming the argument, if a tensor is wrong."""
    import torch

    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor")
        if t.device.type not in part.dtypes:
            where = " or ".join(DEVICES[device] for device in part.dtypes)
            raise ValueError(f"{name} is on {t.device}; it must be on {where} in {part.name}")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; it must be on q's {q.device}")
        dtypes = part.dtypes[t.device.type]
        if str(t.dtype).removeprefix("torch.") not in dtypes:
            known = " or ".join(f"torch.{dtype}" for dtype in dtypes)
            raise TypeError(f"{name} is {t.dtype}; it must be {known} in {part.name}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}; it must be q's {q.dtype}")
        if t.dim() != 4 or t.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must be (B, H, N, d) with no empty dimension"
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
    if part.operator and torch.is_grad_enabled():
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.requires_grad:
                _check_gradient(part, name, t)


def _check_gradient(part: Part, name: str, t) -> None:
    """Raise ValueError if a part computes no gradient of such a tensor."""
    where = f"on {DEVICES[t.device.type]}" if t.is_cuda else f"in {t.dtype}"
    if part.gradient is None:
        who = " and ".join(with_gradient())
        raise ValueError(f"{name} requires a gradient; {part.name} computes none, only {who} do")
    if t.is_cuda or str(t.dtype) != "torch.float32":
        raise ValueError(f"{name} requires a gradient; {part.name} computes none {where}, only part0 does")


def _check_step(part: Part, q, k, step: str | int | None, br: int | None, bc: int | None) -> None:
    """Raise TypeError or ValueError if a step, or an argument that goes with a device, is wrong."""
    if not q.is_cuda:
        raise ValueError(
            f"step is {step!r}; it must be None for tensors on {q.device}: steps are CUDA kernels"
        )
    if part.operator is None:
        return
    for name, size in (("br", br), ("bc", bc)):
        if size is not None:
            raise ValueError(f"{name} is {size}; it must be None on CUDA, where each step has its own tile")
    if step is not None:
        check_step(step)
    if q.shape[3] > WIDEST:
        raise ValueError(f"q has d={q.shape[3]}; it must be at most {WIDEST} on CUDA in {part.name}")
    for name, rows, t in (("q", "Nq", q), ("k", "Nk", k)):
        if t.shape[2] > MOST_ROWS:
            raise ValueError(f"{name} has {rows}={t.shape[2]} rows; it must have at most {MOST_ROWS} on CUDA")
