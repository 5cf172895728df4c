"""The float64 oracle for every kernel, and the error that a float32 result may have."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.generation.sampling import Sampling, drawn

# Awkward shapes: (B, H, Nq, Nk, d)
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 32),
    (2, 3, 63, 63, 24),
    (1, 2, 123, 123, 80),
    (1, 4, 257, 257, 32),
    (1, 1, 1025, 1025, 16),
    (1, 2, 1, 300, 32),
    (2, 1, 7, 40, 33),
    (1, 1, 130, 1000, 64),
    (1, 1, 16, 16, 300),
]


def sample(logits: Tensor, uniforms, sampling=Sampling(), counts: Tensor | None = None) -> list[int]:
    """A token for each row of logits (B, V), as PyTorch's engine draws it by a number in [0, 1)."""
    return drawn(logits, torch.tensor(uniforms, dtype=torch.float64), sampling, counts).tolist()


def qkv(B: int, H: int, Nq: int, Nk: int, d: int, dtype=torch.float32, seed: int = 0) -> list[Tensor]:
    """Random q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, n, d, generator=generator).to(dtype) for n in (Nq, Nk, Nk)]


def strided(*tensors: Tensor) -> dict[str, list[Tensor]]:
    """The same tensors, (B, H, N, d) each, with other strides, by name."""
    B, H, N, d = tensors[0].shape
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in tensors], dim=2)  # (B, N, several H d)
    return {
        "views": [t.view(B, N, H, d).transpose(1, 2) for t in fused.split(H * d, dim=2)],
        "columns": [t.mT.contiguous().mT for t in tensors],
        "every other": [torch.stack([t, -t], dim=-1)[..., 0] for t in tensors],
    }


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, Nq, d) and logsumexp (B, H, Nq) in float64, by the definition, one query at a time."""
    q, k, v = q.double(), k.double(), v.double()
    Nq, Nk = q.shape[2], k.shape[2]
    outs, lses = [], []
    for i in range(Nq):
        n = i + 1 + (Nk - Nq) if causal else Nk
        s = scale * torch.einsum("bhd,bhnd->bhn", q[:, :, i], k[:, :, :n])
        outs.append(torch.einsum("bhn,bhnd->bhd", torch.softmax(s, -1), v[:, :, :n]))
        lses.append(torch.logsumexp(s, -1))
    return torch.stack(outs, 2), torch.stack(lses, 2)


def defined(q, k, v, causal=False, window=(None, None), scale=None, **rules):
    """Output and logsumexp in the inputs' type, by the definition of each of attention()'s rules."""
    Nq, Nk, share = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    names = ("softcap", "alibi_slopes", "sinks", "bias", "documents")
    softcap, alibi_slopes, sinks, bias, documents = map(rules.get, names)
    s = q @ k.repeat_interleave(share, 1).mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    j = torch.arange(Nk, device=q.device)
    p = torch.arange(Nk - Nq, Nk, device=q.device)[:, None]
    left, right = (Nk + Nq if side is None else side for side in window)
    hidden = (j < p - left) | (j > p + (min(right, 0) if causal else right))
    if documents is not None:
        hidden = hidden | (documents[:, None, Nk - Nq :, None] != documents[:, None, None])
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * (j - p).abs()
    if bias is not None:
        added = bias.dtype != torch.bool
        hidden = hidden | (bias == -torch.inf if added else ~bias)
        s = s + torch.where(hidden, 0, bias) if added else s
    m = F.pad(s, (0, 1), value=-1e300).amax(-1, keepdim=True)  # there may be no keys
    weights = s.masked_fill(hidden, -1e300).sub(m).exp() * ~hidden
    l = weights.sum(-1) + (0 if sinks is None else torch.exp(sinks[:, None] - m[..., 0]))  # noqa: E741
    nothing = l == 0
    l = l.masked_fill(nothing, 1)  # noqa: E741
    out = weights @ v.repeat_interleave(share, 1) / l[..., None]
    return out, (m[..., 0] + l.log()).masked_fill(nothing, -torch.inf)


def torch_float32(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's own float32 results. Their error is the measure for the kernels'."""
    Nq, Nk = q.shape[2], k.shape[2]
    mask = torch.ones(Nq, Nk, dtype=torch.bool).tril(Nk - Nq) if causal else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    s = scale * (q @ k.mT)
    return out, torch.logsumexp(s if mask is None else s.masked_fill(~mask, -math.inf), -1)


def torch_float32_in_orders(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, orders: int = 8
) -> tuple[Tensor, Tensor]:
    """torch_float32() in several orders of summation: (orders, B, H, Nq, d) and (orders, B, H, Nq).

    In a case of a few rows, a single order may have almost no error. Twice that is no useful bound.
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
    """The largest change of a score by rounding to float32: half a unit in the last place of the largest.

    It is the relative error of a weight exp(s), so no float32 result can be expected to err less. For scores
    of a few units it is below the floor of 1e-6; for scores of 1e4 it is 5e-4.
    """
    return 2.0**-24 * float((scale * q.double() @ k.double().mT).abs().max())


def assert_close(got: Tensor, expected: Tensor, peer: Tensor, floor: float = 1e-6) -> None:
    """Check that `got` errs at most twice as much as `peer`, plus `floor` times the largest expected value.

    peer may be a stack of results; the largest error among them counts.
    """
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert torch.isfinite(got).all()
    allowed = 2 * (peer - expected).abs().max() + floor * max(1.0, float(expected.abs().max()))
    error = (got - expected).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


# A change of scores, for score_mod
HEADER = """
#include <cmath>
float score(float s, At at) { return 4 * std::tanh(s / 4) + 0.3f * at.h - 0.01f * std::abs(at.i - at.j); }
float slope(float s, At) { const float t = std::tanh(s / 4); return 1 - t * t; }
bool seen(At at) { return (at.i + 2 * at.j + at.b) % 5 != 1; }
"""


def a_bias(choose, B, H, Nq, Nk, device="cuda"):
    """One for all or each batch and head: float with a gradient, with hidden keys, or boolean."""
    bias = torch.randn(choose.choice([1, B]), choose.choice([1, H]), Nq, Nk, device=device)
    hidden = bias.masked_fill(torch.rand_like(bias) < 0.3, -torch.inf)
    return choose.choice([bias.requires_grad_(), hidden.requires_grad_(), bias.detach() > 0])
