"""Five implementations of attention behind one function.

parts.PARTS is the table of implementations; attention() runs one of its rows. torch is imported, and the
extension compiled, on first use: `gpt.py --help` needs neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from shakespeare.attention_ext import rules as ruling
from shakespeare.attention_ext import tiles
from shakespeare.attention_ext.checks import check_tensors, finite, truth
from shakespeare.attention_ext.parts import (
    AUTO,
    PARTS,
    SIMD,
    BuildError,
    Part,
    check_part,
    compatible,
    resolve_simd,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AUTO", "PARTS", "SIMD", "BuildError", "Part", "attention", "operator"]


class Options(TypedDict, total=False):
    """The options of attention() that do not change what it returns."""

    causal: bool
    scale: float | None
    br: int | None
    bc: int | None
    simd: str
    kernel: str | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None
    documents: Tensor | None
    score_mod: str | Path | None


@overload
def attention(
    part: str | Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **_: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    part: str | Part, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **_: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


def attention(
    part: str | Part, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v by one of PARTS.

    part: 'part0' to 'part4', a Part, or the path of a file with a kernel of your own (docs/use/try.md), in
    float32.
    q: (B, H, Nq, d). k, v: (B, H, Nk, d). All float32, in part0 and part4 also all bfloat16, on the CPU, with
    any strides and no empty dimension; in parts 1 to 4 Nq * Nk must be below 2^50. part0 and part4 also take
    tensors on one CUDA device, float32, bfloat16 or float16; part4's d is then at most 256, and Nq and Nk
    below 2^31 - 1023.
    k and v may have fewer heads, Hk: query head h then reads head h * Hk / H.
    causal: query i sees the keys j <= i + (Nk - Nq), as in flash-attention; PyTorch's is_causal means j <= i.
    Nq must be at most Nk. False by default.
    scale: multiplies the scores; 1/sqrt(d) by default.
    br, bc: part4's tile, in queries and keys, each at least 1. None takes the tile that `gpt.py bench --tune`
    found for this case on this machine, else a default. On CUDA they must be None; other parts ignore them.
    simd: one of SIMD, the helpers under the kernels, 'auto' by default; 'off' uses scalar loops. part0, CUDA
    and gradients ignore it.
    kernel: part4's kernel on CUDA, by its name in cuda.kernels: one of KERNELS, or one of BACKWARD, for the
    gradients. What is not named is the fastest that accepts the tensors. On the CPU it must be None; part0
    ignores it on CUDA.
    Rules, in part0, for float32 on the CPU in parts 1 to 4, and but for bias and score_mod on CUDA in part4,
    with flash-attention's names; p = i + Nk - Nq:
    window: (left, right): query i sees the keys p - left to p + right; None is no limit on that side.
    softcap: scores become softcap * tanh(s / softcap), before what follows.
    alibi_slopes: (H,) or (B, H); alibi_slopes[h] * |p - j| is subtracted.
    bias: (1 or B, 1 or H, Nq, Nk) is added; a boolean one hides the keys where it is False.
    sinks: (H,), a logit that joins the softmax's sum and has no value.
    documents: (B, Nk), whole numbers: query i sees keys of key p's document only.
    score_mod: the path of a C++ header with `float score(float s, At at)`, which changes the score last
    (at.b, at.h, at.i, at.j); perhaps `bool seen(At)`, and for gradients `float slope(float s, At)`, the
    derivative by s.
    A query that sees no key gives 0, with the logsumexp -inf or its sink, and no gradients.

    Returns the output, (B, H, Nq, d), contiguous, in q's dtype; with return_lse also the logsumexp of each
    row, m + log(l), (B, H, Nq), float32, for reference.merge(). Sums and the softmax are float32. With AMX
    part4 truncates the softmax's weights to bfloat16, divides by the sum of the truncated weights, and copies
    V, so its scratch grows with N.

    A NaN or infinity in q reaches its row only; in a key or value that is seen, the queries that see it; in a
    masked key or value it may reach the rows of the same tile, as in PyTorch. Denormal numbers count as 0.
    part0, and part4 for float32 on the CPU and for each dtype on CUDA, compute gradients, also of the
    logsumexp, bias and sinks. part4 uses FlashAttention-2, stores no N x N numbers, has no second gradients.
    A number may be NumPy's or a tensor (); None stands for each default.
    Raises TypeError for arguments of a wrong type, ValueError for wrong shapes and values, each naming the
    argument, and BuildError if the extension or a CUDA kernel cannot be compiled.
    """
    call: dict[str, Any] = options  # type: ignore[assignment]
    given: dict[str, Any] = {}
    if not ruling.NAMES.isdisjoint(call):
        given = {name: call.pop(name) for name in ruling.NAMES & call.keys()}
        given = {name: value for name, value in given.items() if value is not None}
    causal, scale, br, bc, helpers, kernel = _checked(**call)
    return_lse = return_lse is not None and truth("return_lse", return_lse)
    import torch

    row = check_part(part)
    try:
        if given or row.operator is None:
            check_tensors(row, q, k, v, causal, grouped=True)
        gradient = q.requires_grad or k.requires_grad or v.requires_grad
        if given:
            gradient = gradient or any(getattr(value, "requires_grad", False) for value in given.values())
        gradient = gradient and torch.is_grad_enabled()
        device = "cpu" if q.is_cpu else q.device.type  # the type takes 0.6 us
        if device == "cuda" and row.operator is None:  # PyTorch's attention ignores them
            kernel = br = bc = None
        # Every part takes float32 on the CPU.
        if device != "cpu" or q.dtype is not torch.float32 or gradient or given or kernel is not None:
            question = row.name, device, q.dtype, gradient, tuple(sorted(given)), kernel, br, bc
            if question not in _answers:
                _answers[question] = compatible(row, *question[1:])
            if _answers[question]:
                raise ValueError(_answers[question])
        rules = ruling.checked(given, q, k.shape[2]) if given else None
        if gradient and rules and rules.score_mod and not rules.score_mod.has_slope:
            header = rules.score_mod.header
            raise ValueError(f"score_mod is {header}; its gradient needs slope(float s, At at)")
        if device == "cuda" and row.operator:
            ruled = bool(rules) or k.shape[1] < q.shape[1]
            more = (rules or ruling.Rules()).on_cuda(q.shape[2]) if ruled else ()
            compute = operator(row.name, "cuda", gradient, return_lse and not gradient and not ruled, ruled)
            found = compute(q, k, v, causal, scale, kernel, *more)
            return found[0] if (gradient or ruled) and not return_lse else found
        (B, H, Nq, d), (_, Hk, Nk, _) = q.shape, k.shape
        scale = 1 / math.sqrt(d) if scale is None else scale
        if row.attend:
            if return_lse:
                raise ValueError(f"return_lse is True; it must be False with {row.name}, which has none")
            return row.attend(q, *_all_heads(q, k, v), causal, scale)
        if row.operator is None:
            from shakespeare.attention_ext.reference import attention as part0

            return part0(q, k, v, causal=causal, scale=scale, return_lse=return_lse, rules=rules)
        if Nq == 1 and Hk < H and rules is None:  # the queries of a group see the same keys
            folded = q.reshape(B, Hk, H // Hk, d)
            both = attention(row, folded, k, v, scale=scale, br=br, bc=bc, simd=helpers, return_lse=True)
            out, lse = (t.reshape(B, H, 1, *t.shape[3:]) for t in both)
            return (out, lse) if return_lse else out
        if (row.name, helpers, gradient, False, bool(rules)) not in _operators:
            check_tensors(row, q, k, v, causal, grouped=True)  # before it is compiled
        tile: tuple[int, ...] = ()
        if row.tiled:
            tuned = tiles.DEFAULT
            if not (br and bc or torch.compiler.is_compiling()):  # a compiled graph cannot read files
                tuned = tiles.tile(helpers, torch.get_num_threads(), d, Nk, causal, B * H * Nq)
            tile = (br or tuned[0], bc or tuned[1])
        rest = tile if gradient else (return_lse, *tile)  # the backward pass needs the logsumexp
        if rules:
            rest = (*rest, *(() if tile else (1, 1)), *rules.arguments(q))
        out, lse = operator(row.name, helpers, gradient, ruled=bool(rules))(q, k, v, causal, scale, *rest)
        return (out, lse) if return_lse else out
    except Exception as error:  # the operators in C++ check the tensors too, but raise RuntimeErrors
        check_tensors(row, q, k, v, causal, grouped=True)
        if type(error) is RuntimeError and q.is_cuda and row.operator:
            from shakespeare.attention_ext.cuda import operators

            operators.raise_reason(error)
        raise


def _checked(causal=False, scale=None, br=None, bc=None, simd="auto", kernel=None) -> tuple:
    """The checked options of attention(), with the helpers for simd."""
    causal = causal is not None and truth("causal", causal)
    scale = None if scale is None else finite("scale", scale)
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel is a {type(kernel).__name__}; it must be a name")
    helpers = resolve_simd("auto" if simd is None else simd)
    if br is not None or bc is not None:
        br, bc = tiles.checked_sides(br, bc)
    return causal, scale, br, bc, helpers, kernel


def _all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


_answers: dict[tuple[Any, ...], str | None] = {}  # of compatible()
_operators: dict[tuple[str, str, bool, bool, bool], Callable] = {}


def operator(
    part: str, simd: str = "auto", gradient: bool = False, lse: bool = False, ruled: bool = False
) -> Callable:
    """The PyTorch operator of one of parts 1 to 4; compiles the extension on first use.

    simd: one of SIMD, or 'cuda' for part4's operator on CUDA. gradient: part4's with a gradient.
    lse: on CUDA, the one that also gives the logsumexp; the others take it as an argument. ruled: the one
    that takes rules.
    Raises ValueError for a part without such an operator, and errors as extension.load() does.
    """
    key = part, simd, gradient, lse, ruled
    if key not in _operators:  # torch.compile can trace a look-up in a table but not a build
        from shakespeare.attention_ext import extension  # the command line starts without it

        if simd == "cuda":
            from shakespeare.attention_ext.cuda import operators

            kind = "_with_gradient" if gradient else "_with_lse" if lse and not ruled else ""
            _operators[key] = getattr(operators, f"flash{'_ruled' * ruled}{kind}")
        else:
            row = check_part(part)
            name = row.gradient if gradient else row.operator
            if ruled and name:
                name = f"{name}_ruled"
            if name is None:
                what = "with a gradient" if gradient else "with an operator"
                raise ValueError(f"part is {part!r}; it must be one {what}; {part} has none")
            _operators[key] = getattr(extension.load(simd), name).default
    return _operators[key]
