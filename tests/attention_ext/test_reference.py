"""FlashAttention-2 in plain PyTorch, the text that part4 is read against."""

from __future__ import annotations

import oracle
import pytest
import torch

from attention_ext import attention, reference


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("br, bc", [(1, 1), (16, 16), (7, 30), (64, 5), (500, 500)])
def test_flash_attention_is_exact_in_float64(br, bc, causal):
    q, k, v = torch.randn(2, 2, 40, 24), torch.randn(2, 2, 61, 24), torch.randn(2, 2, 61, 24)
    expected, expected_lse = oracle.attention(q, k, v, causal, 24**-0.5)
    out, lse = reference.flash_attention(q.double(), k.double(), v.double(), causal=causal, br=br, bc=bc)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_part4_follows_it(extension):
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    out, lse = attention("part4", q, k, v, causal=True, br=16, bc=32, return_lse=True)
    expected, expected_lse = reference.flash_attention(q, k, v, causal=True, br=16, bc=32)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
