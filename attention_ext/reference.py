"""Attention in plain PyTorch: part0, merge(), and part4's algorithm for reading."""

from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    return_lse: bool = False,
    rules: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Part 0: softmax(scale * q k^T) v, all heads at once.

    q: (B, H, Nq, d). k, v: (B, Hk, Nk, d). Any float type; 16-bit types are computed in float32. causal:
    query i sees the keys j <= i + (Nk - Nq). rules: Rules. Returns (B, H, Nq, d) in q's type and,
    with return_lse, the rows' logsumexp (B, H, Nq).
    """
    dtype = q.dtype
    if dtype.itemsize < torch.float32.itemsize:
        q, k, v = (t.float() for t in (q, k, v))
    k, v = with_own_heads(q, k, v)
    s = (scale * q) @ k.mT  # (B, H, Nq, Nk)
    if rules:
        p, lse = _ruled(s, rules, causal)
        out = (p @ v).to(dtype)
        return (out, lse) if return_lse else out
    if causal:
        s = s.masked_fill(~seen(q.shape[2], k.shape[2], s.device), -torch.inf)
    p = torch.softmax(s, dim=-1)
    out = (p @ v).to(dtype)
    return (out, torch.logsumexp(s, dim=-1)) if return_lse else out


def with_own_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (B, H, Nk, d): a head for each of q's, which may share those of (B, Hk, Nk, d)."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def _ruled(s: Tensor, rules: Any, causal: bool) -> tuple[Tensor, Tensor]:
    """The softmax and the logsumexp of scores under rules. A query that sees no key has zeros, and -inf."""
    s, seen = rules.change(s, causal)
    s = s.masked_fill(~seen, -torch.inf)
    if rules.sinks is not None:
        sink = rules.sinks[:, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], dim=-1)
        return torch.softmax(s, dim=-1)[..., :-1], torch.logsumexp(s, dim=-1)
    nothing = ~seen.expand(s.shape).any(-1, keepdim=True)
    s = s.masked_fill(nothing, 0.0)  # their softmax would be NaN, also in gradients
    lse = torch.logsumexp(s, dim=-1).masked_fill(nothing[..., 0], -torch.inf)
    return torch.softmax(s, dim=-1).masked_fill(nothing, 0.0), lse


def seen(Nq: int, Nk: int, device: torch.device | None = None) -> Tensor:
    """The causal mask: (Nq, Nk), True where query i sees key j."""
    return torch.ones(Nq, Nk, dtype=torch.bool, device=device).tril(Nk - Nq)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the results over each; exact up to rounding.

    out_a, out_b: (B, H, Nq, d). lse_a, lse_b: (B, H, Nq), each row's logsumexp m + log(l), as attention(...,
    return_lse=True) returns them. Returns both for all keys together, in the same shapes. A row with lse =
    -inf has seen no key: the other set's result is used, or 0 if both are -inf. A NaN stays in its row. Rabe
    & Staats 2021, arXiv:2112.05682.
    """
    m = torch.maximum(lse_a, lse_b)
    m = m.masked_fill(m == -torch.inf, 0)  # -inf - -inf would be NaN
    weight_a = (lse_a - m).exp()
    weight_b = (lse_b - m).exp()
    l = weight_a + weight_b
    nothing = torch.zeros((), dtype=out_a.dtype, device=out_a.device)
    seen_a = (lse_a != -torch.inf)[..., None]
    seen_b = (lse_b != -torch.inf)[..., None]
    out = torch.where(seen_a, weight_a[..., None] * out_a, nothing)
    out = out + torch.where(seen_b, weight_b[..., None] * out_b, nothing)
    return torch.where(seen_a | seen_b, out / l[..., None], nothing), m + l.log()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    br: int = 64,
    bc: int = 64,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's forward pass, tile by tile: output (B, H, Nq, d) and logsumexp (B, H, Nq).

    q: (B, H, Nq, d). k, v: (B, H, Nk, d). Any float type. scale: 1/sqrt(d) unless given. Dao 2023,
    arXiv:2307.08691, Algorithm 1, whose lines are named. part4_flash.cpp is this loop nest over threads.
    """
    B, H, Nq, d = q.shape
    Nk = k.shape[2]
    scale = d**-0.5 if scale is None else scale
    mask = seen(Nq, Nk, q.device) if causal else None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(B, H, Nq)
    for i0 in range(0, Nq, br):  # line 3
        Qi = q[:, :, i0 : i0 + br]  # line 4
        Oi = torch.zeros_like(Qi)  # line 5
        l = q.new_zeros(*Qi.shape[:3], 1)  # noqa: E741
        m = q.new_full(l.shape, -torch.inf)
        keys = Nk if mask is None else min(Nk, i0 + Qi.shape[2] + Nk - Nq)
        for j0 in range(0, keys, bc):  # line 6; tiles above the diagonal are skipped
            Kj, Vj = k[:, :, j0 : j0 + bc], v[:, :, j0 : j0 + bc]  # line 7
            Sij = scale * (Qi @ Kj.mT)  # line 8
            if mask is not None:
                Sij = Sij.masked_fill(~mask[i0 : i0 + br, j0 : j0 + bc], -torch.inf)
            m_new = torch.maximum(m, Sij.amax(-1, keepdim=True))  # line 9
            m_safe = m_new.masked_fill(m_new == -torch.inf, 0)
            Pij = torch.exp(Sij - m_safe)
            correction = torch.exp(m - m_safe)
            l = correction * l + Pij.sum(-1, keepdim=True)  # noqa: E741
            Oi = correction * Oi + Pij @ Vj  # line 10
            m = m_new
        out[:, :, i0 : i0 + br] = Oi / l  # line 12
        lse[:, :, i0 : i0 + br] = (m + torch.log(l)).squeeze(-1)  # line 13
    return out, lse


def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    br: int = 64,
    bc: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2's backward pass, tile by tile: dq (B, H, Nq, d), dk and dv (B, H, Nk, d).

    q, k, v: as flash_attention() takes them. out, lse: what it gave. dout (B, H, Nq, d) and dlse (B, H, Nq):
    the gradients of both; without dlse, lse's gradient is 0. The logsumexp's derivative by the scores is P,
    so dlse is subtracted from D. Dao 2023, arXiv:2307.08691, Algorithm 2, whose lines are named.
    part4_backward.cpp exchanges the two loops.
    """
    Nq, d = q.shape[2:]
    Nk = k.shape[2]
    scale = d**-0.5 if scale is None else scale
    mask = seen(Nq, Nk, q.device) if causal else None
    dq, dk, dv = map(torch.zeros_like, (q, k, v))  # line 3
    D = (dout * out).sum(-1) - (0 if dlse is None else dlse)  # line 4
    for j0 in range(0, Nk, bc):  # line 5
        j = slice(j0, j0 + bc)
        Kj, Vj = k[:, :, j], v[:, :, j]  # line 6
        first = 0 if mask is None else max(0, j0 - (Nk - Nq)) // br * br
        for i0 in range(first, Nq, br):  # line 8; tiles above the diagonal are skipped
            i = slice(i0, i0 + br)
            Qi, dOi = q[:, :, i], dout[:, :, i]  # line 9
            Sij = scale * (Qi @ Kj.mT)  # line 10
            if mask is not None:
                Sij = Sij.masked_fill(~mask[i, j], -torch.inf)
            Pij = torch.exp(Sij - lse[:, :, i, None])  # line 11
            dv[:, :, j] += Pij.mT @ dOi  # line 12
            dPij = dOi @ Vj.mT  # line 13
            dSij = scale * Pij * (dPij - D[:, :, i, None])  # line 14
            dq[:, :, i] += dSij @ Kj  # line 15
            dk[:, :, j] += dSij.mT @ Qi  # line 16
    return dq, dk, dv
