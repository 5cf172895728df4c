"""FlashAttention-2 in plain PyTorch, and merging results over sets of keys."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from attention_ext import reference


def qkv(Nq, Nk, d=16, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, n, d, generator=generator, dtype=dtype) for n in (Nq, Nk, Nk))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("br, bc", [(1, 1), (7, 30), (500, 500)])
def test_flash_attention_is_exact_in_float64(br, bc, causal):
    q, k, v = torch.randn(2, 2, 40, 24), torch.randn(2, 2, 61, 24), torch.randn(2, 2, 61, 24)
    expected, expected_lse = oracle.attention(q, k, v, causal, 24**-0.5)
    out, lse = reference.flash_attention(q.double(), k.double(), v.double(), causal=causal, br=br, bc=bc)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, -1e3])
@pytest.mark.parametrize("cut", [1, 30])
def test_two_sets_of_keys_merge_exactly_in_float64(cut, scale):
    q, k, v = qkv(20, 100, dtype=torch.float64)
    whole = reference.attention(q, k, v, causal=False, scale=scale, return_lse=True)
    halves = [
        reference.attention(q, k[:, :, keys], v[:, :, keys], causal=False, scale=scale, return_lse=True)
        for keys in (slice(cut), slice(cut, None))
    ]
    for a, b in (halves, halves[::-1]):
        out, lse = reference.merge(*a, *b)
        torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


def test_rows_without_keys_take_the_other_result():
    """The output of such a row is 0 / 0 in most implementations. It is ignored."""
    q, k, v = qkv(5, 30)
    out, lse = reference.attention(q, k, v, causal=False, scale=0.25, return_lse=True)
    none, empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for merged in (reference.merge(out, lse, none, empty), reference.merge(none, empty, out, lse)):
        torch.testing.assert_close(merged, (out, lse))
    nothing, still_empty = reference.merge(none, empty, none, empty)
    assert torch.equal(nothing, torch.zeros_like(out)) and torch.equal(still_empty, empty)
