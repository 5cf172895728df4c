"""FlashAttention-2 in plain PyTorch, and merging results over sets of keys."""

import itertools
import math

import oracle
import torch
from support import naming

from shakespeare.attention_ext import reference


def qkv(Nq, Nk):
    return oracle.qkv(2, 3, Nq, Nk, 24, torch.float64)


def assert_exact(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_flash_attention_and_its_gradients_are_exact_in_float64():
    q, k, v = (t.requires_grad_() for t in qkv(40, 61))
    dout, dlse = torch.randn_like(q), torch.randn_like(q[..., 0])
    for causal, of_lse in itertools.product((False, True), (None, dlse)):
        scale = 0.7 if causal else None
        exact = oracle.attention(q, k, v, causal, scale or 24**-0.5)
        given = dout, torch.zeros_like(dlse) if of_lse is None else of_lse
        gradients = torch.autograd.grad(exact, (q, k, v), given)
        for br, bc in ((1, 1), (7, 30), (500, 500)):
            options = dict(causal=causal, scale=scale, br=br, bc=bc)
            with naming(options), torch.no_grad():
                out, lse = reference.flash_attention(q, k, v, **options)
                assert_exact((out, lse), exact)
                got = reference.flash_attention_backward(q, k, v, out, lse, dout, of_lse, **options)
                torch.testing.assert_close(got, gradients, rtol=1e-11, atol=1e-11)


def test_two_sets_of_keys_merge_exactly_in_float64():
    q, k, v = qkv(20, 100)
    for cut, scale in itertools.product((1, 30), (1.0, -1e3)):
        options = dict(causal=False, scale=scale, return_lse=True)
        first = reference.attention(q, k[:, :, :cut], v[:, :, :cut], **options)
        last = reference.attention(q, k[:, :, cut:], v[:, :, cut:], **options)
        for merged in (reference.merge(*first, *last), reference.merge(*last, *first)):
            with naming(cut, scale):
                assert_exact(merged, reference.attention(q, k, v, **options))


def test_rows_without_keys_take_the_other_result():
    """The output of such a row is 0 / 0 in most implementations. It is ignored."""
    out, lse = reference.attention(*qkv(5, 30), causal=False, scale=0.25, return_lse=True)
    none, empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for merged in (reference.merge(out, lse, none, empty), reference.merge(none, empty, out, lse)):
        torch.testing.assert_close(merged, (out, lse))
    assert_exact(reference.merge(none, empty, none, empty), (torch.zeros_like(out), empty))
