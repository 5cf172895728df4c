"""flash-attn 2.8's functions, with its names, shapes and defaults, on CPU and CUDA tensors, by part 4.

    from shakespeare.flash_attn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)  # (B, Sq, H, d), as q

q is (B, Sq, H, d), k and v are (B, Sk, Hk, d), where Hk divides H; float32, bfloat16 or float16. `causal` and
`window_size` are aligned at the bottom right. A query that sees no key gives 0, with the logsumexp inf.
`return_attn_probs` returns (out, logsumexp, an empty tensor). `deterministic` is always true. Errors are
TypeError and ValueError that name the argument. docs/use/models.md says what is refused.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.attention_ext import Part, attention, parts
from shakespeare.attention_ext.checks import check_shapes, type_text, whole_number

__version__ = "2.8.3"  # flash-attn's, whose functions these are
MODULES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding")


def install() -> None:
    """Make `import flash_attn` give this module. Raises RuntimeError where the real one is installed."""
    here = sys.modules[__name__]
    if sys.modules.get(MODULES[0]) is not here and importlib.util.find_spec(MODULES[0]):
        raise RuntimeError("flash_attn is installed; install() must be left out, or flash-attn removed")
    for name in MODULES:
        sys.modules[name] = here
        setattr(here, name.rpartition(".")[2], here)


def attend(
    part: str | Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    return_lse: bool = False,
    **rules: Any,
) -> tuple[Tensor, Tensor | None]:
    """attention() and its logsumexp or None, for any Nq and Nk and in each dtype; a rule may be None.

    On the CPU, what a part takes in float32 only is computed in it.
    """
    Nq = q.size(2)
    Nk = k.size(2)
    if causal and Nq > Nk:  # the first queries see nothing
        more = dict(causal=True, scale=scale, window=window, return_lse=return_lse, **rules)
        out, lse = attend(part, q[:, :, Nq - Nk :], k, v, **more)
        out = F.pad(out, (0, 0, Nq - Nk, 0))
        return out, None if lse is None else F.pad(lse, (Nq - Nk, 0), value=-torch.inf)
    if not (Nq and Nk):
        check_shapes(q, k, v, causal=False, min_rows=0, grouped=True)
        everywhere = torch.ones((), dtype=torch.bool, device=q.device)  # a fill that has a gradient
        return q.masked_fill(everywhere, 0), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    if rules:
        rules = {name: value for name, value in rules.items() if value is not None}
    left, right = window
    if left is not None and left < Nk - 1:
        if Nq == 1 and causal and rules.keys() <= {"softcap", "alibi_slopes", "sinks"}:
            k = k[:, :, Nk - 1 - left :]
            v = v[:, :, Nk - 1 - left :]
        else:
            rules["window"] = left, right
    elif right is not None and not causal and right < Nq - 1:
        rules["window"] = None, right
    dtype = q.dtype
    if dtype is not torch.float32 and q.is_cpu:
        gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if parts.compatible(part, "cpu", dtype, gradient, tuple(rules)):
            q, k, v = (t.float() if t.dtype is dtype else t for t in (q, k, v))
    call: Any = attention  # mypy asks for literals
    found = call(part, q, k, v, causal=causal, scale=scale, return_lse=return_lse, **rules)
    out, lse = found if return_lse else (found, None)
    return (out if q.dtype is dtype else out.to(dtype)), lse


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The options of attend() that these arguments of flash-attn stand for."""
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}; it must be 0, as part 4 drops no probabilities")
    if window_size == (-1, -1) and softcap <= 0 and alibi_slopes is None:
        return {"causal": causal, "scale": softmax_scale}
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size is {type_text(window_size)}; it must be (left, right)")
    left, right = (
        None if keys < 0 else keys for keys in (whole_number("window_size", side) for side in window_size)
    )
    return {
        "causal": causal or right == 0,
        "scale": softmax_scale,
        "window": (left, right),
        "softcap": softcap if softcap > 0 else None,
        "alibi_slopes": alibi_slopes,
    }


def _check(q: Any, k: Any, v: Any, sizes: str, names: Sequence[str] = "qkv") -> None:
    """Raise TypeError or ValueError unless these are tensors with sizes as `sizes` names q's.

    names: of q, k and v. k and v may have any S, and an Hk that divides H.
    """
    for name, t in zip(names, (q, k, v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}; it must be a tensor")
    of_q = q.shape
    of_k = k.shape
    dimensions = 3 if sizes[1] == "t" else 4
    for name, shape in ((names[0], of_q), (names[1], of_k)):
        if len(shape) != dimensions or not (shape[-1] and shape[-2] and (shape[0] or dimensions == 3)):
            must = "with no empty dimension but S" if dimensions == 4 else "with H and d above 0"
            raise ValueError(f"{name} has shape {tuple(shape)}; it must be {sizes} {must}")
    if of_q[-1] != of_k[-1] or of_q[-2] % of_k[-2]:
        must = f"its d must be {names[0]}'s {of_q[-1]}, its heads must divide {names[0]}'s {of_q[-2]}"
        raise ValueError(f"{names[1]} has shape {tuple(of_k)}; {must}")
    if v.shape != of_k:
        raise ValueError(f"{names[2]} has shape {tuple(v.shape)}; it must be {names[1]}'s, {tuple(of_k)}")


def _unpack(packed: Tensor, name: str, count: int, sizes: str) -> Any:
    """The tensors that lie packed in the dimension before H."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; it must be a tensor")
    if packed.dim() != sizes.count(",") + 1 or packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be {sizes}")
    return packed.unbind(-3)


def _as_flash(out: Tensor, lse: Tensor | None, return_attn_probs: bool) -> Any:
    """What flash-attn returns, from attend()'s output as (..., S, H, d), contiguous."""
    if lse is None or not return_attn_probs:
        return out
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), out.new_empty(0)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, Sq, H, d) over k and v (B, Sk, Hk, d): (B, Sq, H, d), logsumexp (B, H, Sq)."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    try:  # attention() checks the shapes, in its layout
        in_heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = attend("part4", *in_heads, return_lse=return_attn_probs, **options)
    except (AttributeError, IndexError, TypeError, ValueError):
        _check(q, k, v, "(B, S, H, d)")
        if k.size(0) != q.size(0):
            raise ValueError(f"k has shape {tuple(k.shape)}; its B must be q's {q.size(0)}") from None
        raise
    return _as_flash(out.transpose(1, 2).contiguous(), lse, return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """flash_attn_func() of kv (B, Sk, 2, Hk, d)."""
    return flash_attn_func(q, *_unpack(kv, "kv", 2, "(B, S, 2, H, d)"), *options, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """flash_attn_func() of qkv (B, S, 3, H, d)."""
    return flash_attn_func(*_unpack(qkv, "qkv", 3, "(B, S, 3, H, d)"), *options, **named)


def _lengths(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[list[int]]:
    """The texts' lengths in q and in k, and last the rows that follow them; read from a GPU once."""
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, Tensor) or cu.dtype is not torch.int32:
            is_a = cu.dtype if isinstance(cu, Tensor) else f"a {type(cu).__name__}"
            raise TypeError(f"{name} is {is_a}; it must be a tensor of torch.int32")
        if cu.dim() != 1 or len(cu) < 2 or cu.shape != cu_seqlens_q.shape:
            raise ValueError(f"{name} has shape {tuple(cu.shape)}; it must be (texts + 1,), as cu_seqlens_q")
    found = []
    both = torch.stack((cu_seqlens_q, cu_seqlens_k)).tolist()
    for name, ends, t in zip(("cu_seqlens_q", "cu_seqlens_k"), both, (q, k)):
        lengths = [end - start for start, end in zip(ends, ends[1:])]
        if ends[0] or min(lengths) < 0 or ends[-1] > len(t):
            must = f"it must grow from 0 to at most the {len(t)} rows"
            raise ValueError(f"{name} is {ends[0]} to {ends[-1]}; {must}")
        found.append([*lengths, len(t) - ends[-1]])
    return found


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Any:
    """Attention of each text in q (total, H, d) over its own in k and v: (total, H, d), logsumexp (H, total).

    Text i is rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] of q, and cu_seqlens_k's of k and v. If both are the
    same tensor, all texts are one call, and their lengths are not read from a GPU; else a text is a call.
    """
    _check(q, k, v, "(total, H, d)")
    if block_table is not None:
        raise ValueError("block_table is given; it must be None, as pages are not taken")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    by_text = alibi_slopes if alibi_slopes is not None and alibi_slopes.dim() == 2 else None
    if cu_seqlens_q is cu_seqlens_k and len(q) == len(k) and by_text is None:
        if q.is_cpu and not torch.compiler.is_compiling():
            _lengths(q, k, cu_seqlens_q, cu_seqlens_k)
        ends = cu_seqlens_q[1:].contiguous()
        rows = torch.arange(len(q), dtype=ends.dtype, device=q.device)
        options["documents"] = torch.searchsorted(ends, rows, right=True)[None]
        in_heads = (t[None].transpose(1, 2) for t in (q, k, v))
        out, lse = attend("part4", *in_heads, return_lse=return_attn_probs, **options)
        out = out.transpose(1, 2)[0].contiguous()
        return _as_flash(out, None if lse is None else lse[0], return_attn_probs)
    lengths = _lengths(q, k, cu_seqlens_q, cu_seqlens_k)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    texts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]))
    for i, text in enumerate(texts):
        if by_text is not None and i < len(by_text):
            options["alibi_slopes"] = by_text[i]
        out, lse = attend("part4", *(t[None].transpose(1, 2) for t in text), return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])  # type: ignore[index]
    return _as_flash(torch.cat(outs), torch.cat(lses, 1), return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """flash_attn_varlen_func() of kv (total, 2, Hk, d)."""
    return flash_attn_varlen_func(q, *_unpack(kv, "kv", 2, "(total, 2, H, d)"), *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    """flash_attn_varlen_func() of qkv (total, 3, H, d)."""
    q, k, v = _unpack(qkv, "qkv", 3, "(total, 3, H, d)")
    lengths: Any = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (B, Sq, H, d) over a cache (rows, S, Hk, d), which k and v (B, Snew, Hk, d) join.

    cache_seqlens: the keys in the cache before the call, one number or (B,); the new ones are written behind
    them, in place. cache_batch_idx: (B,), each text's row of the cache. cache_leftpad: (B,), each text's
    first key. Tensors of lengths are read from a GPU once; texts of unequal lengths are a call each. No
    gradients are computed.
    """
    refused = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "block_table": block_table}
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"{name} is given; it must be None, as this function takes none")
    _check(q, k_cache, v_cache, "(B, S, H, d)", ("q", "k_cache", "v_cache"))
    B = q.shape[0]
    rows, S = k_cache.shape[:2]
    new = 0
    if k is not None:
        _check(q, k, v, "(B, S, H, d)")
        new = k.shape[1]
        if k.shape[0] != B or k.shape[2] != k_cache.shape[2]:
            must = f"it must be ({B}, S, {k_cache.shape[2]}, d), as q and k_cache are"
            raise ValueError(f"k has shape {tuple(k.shape)}; {must}")
        if cache_seqlens is None:
            raise ValueError("cache_seqlens is None; it must be given with k")
    texts = _places(B, rows, S, new, cache_seqlens, cache_batch_idx, cache_leftpad)
    options = _options(0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    outs: list[Tensor] = []
    lses: list[Any] = []
    for text, row, first, end in texts:
        if k is not None and v is not None:
            k_cache[row, end - new : end] = k[text]
            v_cache[row, end - new : end] = v[text]
        if alibi_slopes is not None and alibi_slopes.dim() == 2:
            options["alibi_slopes"] = alibi_slopes[text]
        in_heads = (t.transpose(1, 2) for t in (q[text], k_cache[row, first:end], v_cache[row, first:end]))
        out, lse = attend("part4", *in_heads, return_lse=return_softmax_lse, **options)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    out = torch.cat(outs) if len(outs) > 1 else outs[0].contiguous()
    return _as_flash(out, torch.cat(lses), True)[:2] if return_softmax_lse else out


def _places(
    B: int,
    rows: int,
    S: int,
    new: int,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> list[tuple[slice, slice, int, int]]:
    """The calls: each call's texts, their rows of the cache, their first key, and the end of their keys."""
    table = {
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "cache_seqlens": cache_seqlens,
    }
    tensors = {name: value for name, value in table.items() if isinstance(value, Tensor) and value.dim()}
    for name, value in tensors.items():
        if value.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {value.dtype}; it must be torch.int32")
        if value.shape != (B,):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be ({B},)")
    read = dict(zip(tensors, torch.stack([t.int() for t in tensors.values()]).tolist())) if tensors else {}
    if "cache_seqlens" not in read:
        length = whole_number("cache_seqlens", S if cache_seqlens is None else cache_seqlens)
        read["cache_seqlens"] = [length for _ in range(B)]
    if B > rows and "cache_batch_idx" not in read:
        raise ValueError(f"k_cache has shape ({rows}, ...); it must have q's {B} texts, or cache_batch_idx")
    lengths = read["cache_seqlens"]
    first = read.get("cache_leftpad", [0 for _ in range(B)])
    row = read.get("cache_batch_idx", [*range(B)])
    for name, values, minimum, maximum in (
        ("cache_seqlens", lengths, 0, S - new),
        ("cache_leftpad", first, 0, S),
        ("cache_batch_idx", row, 0, rows - 1),
    ):
        if min(values) < minimum or max(values) > maximum:
            raise ValueError(f"{name} is {values}; it must be from {minimum} to {maximum}")
    if len({*lengths}) == len({*first}) == 1 and row == [*range(row[0], row[0] + B)]:
        return [(slice(0, B), slice(row[0], row[0] + B), first[0], lengths[0] + new)]
    return [(slice(i, i + 1), slice(row[i], row[i] + 1), first[i], lengths[i] + new) for i in range(B)]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """The rows (total, ...) of hidden_states (B, S, ...) where a mask (B, S) is true, as bert_padding has it.

    Also their places in B * S, cu_seqlens, the longest text, and each text's rows. unused_mask: places
    that are taken too, but that the last does not count.
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """The tensor's rows `indices`, as bert_padding has it."""
    return rows[indices]


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The rows of unpad_input() at their places in (batch, seqlen, ...), with zeros elsewhere."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
