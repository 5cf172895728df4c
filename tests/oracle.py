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


def torch_float32_in_orders(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, orders: int = 8
) -> tuple[Tensor, Tensor]:
    """The same with the sums taken in several orders, (orders, B, H, Nq, d) and (orders, B, H, Nq).

    In a case of a few rows one order may err by next to nothing, and twice that is no measure.
    """
    generator = torch.Generator().manual_seed(0)
    results = [torch_float32(q, k, v, causal, scale)]
    always = k.shape[2] - q.shape[2] + 1 if causal else k.shape[2]  # keys that every query sees
    for _ in range(orders - 1):
        terms = torch.randperm(q.shape[3], generator=generator)
        keys = torch.arange(k.shape[2])
        keys[:always] = torch.randperm(always, generator=generator)
        results.append(torch_float32(q[..., terms], k[:, :, keys][..., terms], v[:, :, keys], causal, scale))
    outs, lses = zip(*results)
    return torch.stack(outs), torch.stack(lses)


def score_rounding(q: Tensor, k: Tensor, scale: float) -> float:
    """What rounding the largest score to float32 can change it by, half a unit in its last place.

    A weight exp(s) changes by this factor, so no float32 result can be sure of more; for scores of
    some units it is below the floor of 1e-6, for scores of 1e4 it is 5e-4.
    """
    return 2.0**-24 * float((scale * q.double() @ k.double().mT).abs().max())


def assert_close(got: Tensor, expected: Tensor, peer: Tensor, floor: float = 1e-6) -> None:
    """`got` errs at most twice as much as `peer`, plus `floor` of the largest expected value.

    peer may be several results stacked: the one that errs most counts.
    """
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert torch.isfinite(got).all()
    allowed = 2 * (peer - expected).abs().max() + floor * max(1.0, float(expected.abs().max()))
    error = (got - expected).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
