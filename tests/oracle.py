"""The float64 oracle that every kernel is held against, and how far from it a float32 result may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, Nq, d) and logsumexp (B, H, Nq) in float64, one query at a time, as defined."""
    q, k, v = q.double(), k.double(), v.double()
    Nq, Nk = q.shape[2], k.shape[2]
    outs, lses = [], []
    for i in range(Nq):
        n = i + 1 + (Nk - Nq) if causal else Nk
        s = scale * torch.einsum("bhd,bhnd->bhn", q[:, :, i], k[:, :, :n])
        outs.append(torch.einsum("bhn,bhnd->bhd", torch.softmax(s, -1), v[:, :, :n]))
        lses.append(torch.logsumexp(s, -1))
    return torch.stack(outs, 2), torch.stack(lses, 2)


def torch_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's own float32 results: what the field takes for good."""
    Nq, Nk = q.shape[2], k.shape[2]
    mask = torch.ones(Nq, Nk, dtype=torch.bool).tril(Nk - Nq) if causal else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    s = scale * (q @ k.mT)
    return out, torch.logsumexp(s if mask is None else s.masked_fill(~mask, -math.inf), -1)


def score_rounding(q: Tensor, k: Tensor, scale: float) -> float:
    """What rounding the largest score to float32 can change it by, half a unit in its last place.

    A weight exp(s) changes by this factor, so no float32 result can be sure of more; for scores of
    some units it is below the floor of 1e-6, for scores of 1e4 it is 5e-4.
    """
    return 2.0**-24 * float((scale * q.double() @ k.double().mT).abs().max())


def assert_close(got: Tensor, expected: Tensor, peer: Tensor, floor: float = 1e-6) -> None:
    """`got` errs at most twice as much as `peer`, plus `floor` of the largest expected value."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert torch.isfinite(got).all()
    allowed = 2 * (peer - expected).abs().max() + floor * max(1.0, float(expected.abs().max()))
    error = (got - expected).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
