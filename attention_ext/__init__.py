"""Five implementations of attention behind one function.

parts.PARTS is the table of implementations; attention() runs one of its rows. torch is imported, and the
extension compiled, on first use: `gpt.py --help` needs neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from shakespeare.attention_ext import default_tile, torch_func
from shakespeare.attention_ext import rules as ruling
from shakespeare.attention_ext.checks import Sizes, check_tensors, finite, truth, type_text
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


class Options(ruling.Options, total=False):
    """The options of attention() that do not change what it returns."""

    causal: bool | None
    scale: float | None
    br: int | None
    bc: int | None
    simd: str | None
    kernel: str | None


@overload
def attention(
    part: str | Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] | None = ...,
    **_: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    part: str | Part, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **_: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


def attention(
    part: str | Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = False,
    scale: float | None = None,
    return_lse: bool | None = False,
    br: int | None = None,
    bc: int | None = None,
    simd: str | None = "auto",
    kernel: str | None = None,
    **rules: Unpack[ruling.Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v by one of PARTS.

    Shapes
        q: (B, H, Nq, d). k, v: (B, Hk, Nk, d), where Hk divides H: query head h reads head h * Hk / H.
        The output is (B, H, Nq, d), contiguous, in q's dtype; part 4 on CUDA gives one that is contiguous as
        (B, Nq, H, d) if q is so. Tensors have any strides, no empty dimension.
        On the CPU: float32, in part0 and part4 also bfloat16. In parts 1 to 4 Nq * Nk is below 2^50.
        On CUDA: part0 and part4, float32, bfloat16 or float16, all tensors on one device. part4's d is at
        most 256, Nq and Nk below 2^31 - 1023.

    Options. A number may be NumPy's or a tensor (); None stands for each default.
        part: 'part0' to 'part4', a Part, or the path of a file with a kernel of your own (docs/use/try.md),
        in float32.
        causal: query i sees the keys j <= i + (Nk - Nq), as in flash-attention; PyTorch's is_causal means
        j <= i. Nq must be at most Nk. False by default.
        scale: multiplies the scores; 1/sqrt(d) by default.
        return_lse: also returns the logsumexp of each row, m + log(l), (B, H, Nq), float32, for
        reference.merge().
        br, bc: part4's tile, in queries and keys, each at least 1. None takes the tile that `gpt.py bench
        --tune` found for this case on this machine, else a default. On CUDA they must be None; other parts
        ignore them.
        simd: one of SIMD, the helpers under the kernels, 'auto' by default; 'off' uses scalar loops. part0,
        CUDA and gradients ignore it.
        kernel: part4's kernel on CUDA, by its name in cuda.kernels: one of KERNELS, or one of BACKWARD, for
        the gradients. By default the fastest that accepts the tensors. On the CPU it must be None; part0
        ignores it on CUDA.

    Rules, with flash-attention's names; p = i + Nk - Nq
        They hold in part0, for float32 on the CPU in parts 1 to 4, and on CUDA in part4. A query that sees no
        key gives 0, with the logsumexp -inf or its sink, and no gradients.
        window: (left, right): query i sees the keys p - left to p + right; None is no limit on that side.
        softcap: scores become softcap * tanh(s / softcap), before what follows.
        alibi_slopes: (H,) or (B, H); alibi_slopes[h] * |p - j| is subtracted.
        bias: (1 or B, 1 or H, Nq, Nk), float32, is added; a boolean one hides the keys where it is False. Its
        gradient in part4 is written for each batch and head, (B, H, Nq, Nk), then summed in a fixed order.
        sinks: (H,), a logit that joins the softmax's sum and has no value.
        documents: (B, Nk), whole numbers: query i sees keys of key p's document only.
        score_mod: the path of a C++ header with `float score(float s, At at)`, which changes the score last
        (at.b, at.h, at.i, at.j); perhaps `bool seen(At)`, and for gradients `float slope(float s, At)`, the
        derivative by s. On CUDA part4 has it compiled in by NVRTC, with <cmath> and std::min and std::max of
        the C++ library, once for each width of heads; there __CUDACC_RTC__ is defined. A saved header is
        compiled again. part0 computes it on the CPU, for tensors on CUDA too.

    Gradients
        part0, and part4 for float32 on the CPU and for each dtype on CUDA, compute gradients, also of the
        logsumexp, bias and sinks. part4 uses FlashAttention-2, stores no N x N numbers, has no second
        gradients. Both go through torch.func's grad, jacrev and vmap, part0 through its other transforms too.

    Numbers
        Sums and the softmax are float32. Denormal numbers count as 0. With AMX part4 truncates the softmax's
        weights to bfloat16, divides by the sum of the truncated weights, and copies V, so its scratch grows
        with N.
        A NaN or infinity in q reaches its row only; in a key or value that is seen, the queries that see it;
        in a masked key or value it may reach the rows of the same tile, as in PyTorch.

    Errors
        TypeError for arguments of a wrong type, ValueError for wrong shapes and values, each naming the
        argument; BuildError if the extension or a CUDA kernel cannot be compiled; RuntimeError without memory
        on the CPU, torch.OutOfMemoryError on CUDA.
    """
    row = check_part(part)
    causal = causal is not None and truth("causal", causal)
    return_lse = return_lse is not None and truth("return_lse", return_lse)
    if scale is not None:
        scale = finite("scale", scale)
    if br is not None or bc is not None:
        br, bc = default_tile.checked_sides(br, bc)
    simd = resolve_simd("auto" if simd is None else simd)
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel is {type_text(kernel)}; it must be a name")
    sizes = check_tensors(row, q, k, v, causal, grouped=True)
    *_, Nk, d = sizes
    named = ruling.named(rules) if rules else {}
    gradient = q.requires_grad or k.requires_grad or v.requires_grad
    if named and not gradient:
        gradient = ruling.any_gradient(named)
    if gradient:
        import torch

        gradient = torch.is_grad_enabled()
    if gradient or named or kernel is not None or not q.is_cpu:  # check_tensors() has checked the rest
        _check_row(row, q, gradient, named, kernel, br, bc)
    checked = ruling.checked(named, q, Nk, gradient) if named else None
    if scale is None:
        scale = 1 / math.sqrt(d)
    if row.operator is None:
        from shakespeare.attention_ext import reference

        if row.attend is None:
            return reference.attention(
                q, k, v, causal=causal, scale=scale, return_lse=return_lse, rules=checked
            )
        if return_lse:
            raise ValueError(f"return_lse is True; it must be False with {row.name}, which has none")
        return row.attend(q, *reference.with_own_heads(q, k, v), causal, scale)
    if q.is_cpu:
        return _on_cpu(row, q, k, v, sizes, causal, scale, return_lse, gradient, checked, br, bc, simd)
    return _on_cuda(row, q, k, v, sizes, causal, scale, return_lse, gradient, checked, kernel)


_accepted: dict[tuple[Any, ...], bool] = {}  # what compatible() found to go together


def _check_row(
    row: Part,
    q: Tensor,
    gradient: bool,
    rules: Collection[str],
    kernel: str | None,
    br: int | None,
    bc: int | None,
) -> None:
    """Raise ValueError with the sentence of compatible(), if it has one."""
    device = q.device.type
    if device == "cuda" and row.operator is None:  # PyTorch's attention ignores them
        kernel = br = bc = None
    asked = row.name, device, q.dtype, gradient, tuple(sorted(rules)), kernel, br, bc
    if asked not in _accepted:  # torch.compile can trace a look-up in a table
        reason = compatible(row, *asked[1:])
        if reason:
            raise ValueError(reason)
        _accepted[asked] = True


def _on_cpu(
    row: Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    causal: bool,
    scale: float,
    return_lse: bool,
    gradient: bool,
    rules: ruling.Rules | None,
    br: int | None,
    bc: int | None,
    simd: str,
) -> Tensor | tuple[Tensor, Tensor]:
    """Parts 1 to 4."""
    import torch

    B, H, Hk, Nq, Nk, d = sizes
    transformed = torch_func.active(q, k, v)
    if transformed:  # an inner vmap hides whether an outer transform needs gradients
        gradient = True
        _check_row(row, q, gradient, (), None, None, None)
    folded = Nq == 1 and Hk < H and rules is None
    if folded:  # the queries of a group see the same keys
        q = q.reshape(B, Hk, H // Hk, d)
        causal = False
    if not row.tiled:
        br = bc = 1
    elif not (br and bc):
        tuned = default_tile.DEFAULT
        if not torch.compiler.is_compiling():  # a compiled graph cannot read files
            tuned = default_tile.tile(simd, torch.get_num_threads(), d, Nk, causal, B * H * Nq)
        br = br or tuned[0]
        bc = bc or tuned[1]
    rest: tuple[Any, ...] = (br, bc) if gradient else (return_lse, br, bc)  # gradients need the logsumexp
    if rules:
        rest += rules.arguments()
    compute = operator(row.name, simd, gradient, ruled=rules is not None)
    if transformed:
        compute = torch_func.functions[compute]
    out, lse = compute(q, k, v, causal, scale, *rest)
    if folded:
        out = out.reshape(B, H, 1, d)
    if not return_lse:
        return out
    return out, lse.reshape(B, H, 1) if folded else lse


def _on_cuda(
    row: Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    causal: bool,
    scale: float,
    return_lse: bool,
    gradient: bool,
    rules: ruling.Rules | None,
    kernel: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Part 4."""
    _, H, Hk, *_ = sizes
    transformed = torch_func.active(q, k, v)
    gradient = gradient or transformed
    ruled = rules is not None or Hk < H
    more = (rules or ruling.Rules()).on_cuda().arguments() if ruled else ()
    compute = operator(row.name, "cuda", gradient, return_lse, ruled)
    if transformed:
        compute = torch_func.functions[compute]
    try:
        found = compute(q, k, v, causal, scale, kernel, *more)
    except RuntimeError as error:  # the launcher's; the planner's own may have another type
        from shakespeare.attention_ext.cuda import operators

        operators.raise_reason(error)
        raise
    return found[0] if (gradient or ruled) and not return_lse else found


_operators: dict[tuple[str, str, bool, bool, bool], Callable] = {}
ON_CUDA = {  # the operators of cuda.operators, by gradient and ruled
    (False, False): "flash",
    (False, True): "flash_ruled",
    (True, False): "flash_with_gradient",
    (True, True): "flash_ruled_with_gradient",
}


def operator(
    part: str, simd: str = "auto", gradient: bool = False, lse: bool = False, ruled: bool = False
) -> Callable:
    """The PyTorch operator of one of parts 1 to 4; compiles the extension on first use.

    simd: one of SIMD, or 'cuda' for part4's operator on CUDA. gradient: part4's with a gradient. ruled: the
    one that takes rules. lse: on CUDA, also gives the logsumexp, as those with a gradient or rules do; the
    others take it as an argument.
    Raises ValueError for a part without such an operator, and errors as extension.load() does.
    """
    key = part, simd, gradient, lse, ruled
    found = _operators.get(key)  # torch.compile can trace a look-up in a table but not a build
    if found is None:
        found = _operators[key] = _load(*key)
    return found


def _load(part: str, simd: str, gradient: bool, lse: bool, ruled: bool) -> Callable:
    if simd == "cuda":
        from shakespeare.attention_ext.cuda import operators

        if lse and not (gradient or ruled):
            return operators.flash_with_lse
        return getattr(operators, ON_CUDA[gradient, ruled])
    from shakespeare.attention_ext import extension  # the command line starts without it

    row = check_part(part)
    name = row.gradient if gradient else row.operator
    if name is None:
        what = "with a gradient" if gradient else "with an operator"
        raise ValueError(f"part is {part!r}; it must be one {what}; {part} has none")
    return getattr(extension.load(simd), f"{name}_ruled" if ruled else name).default
