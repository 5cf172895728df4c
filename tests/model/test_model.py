"""The architecture: nanoGPT's parameters, the KV cache, and every part as its attention."""

from __future__ import annotations

from functools import partial

import pytest
import tiny
import torch
from support import naming
from torch.nn import functional as F

from shakespeare.attention_ext import attention
from shakespeare.model.config import GPTConfig
from shakespeare.model.kv_cache import KVCache


def attend(part="part0"):
    return partial(attention, part, causal=True, br=4, bc=8)


def sdpa(q, k, v):
    Nq, Nk = q.shape[2], k.shape[2]
    mask = torch.ones(Nq, Nk, dtype=torch.bool).tril(Nk - Nq)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@torch.no_grad()
def test_every_part_gives_the_logits_of_pytorch_with_and_without_a_cache(part):
    ids = torch.randint(11, (1, 16))
    for bias in (False, True):
        expected = tiny.gpt(sdpa, bias=bias)(ids)
        model = tiny.gpt(attend(part), bias=bias)
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)
        c = model.config
        for cuts in ([16], [1] * 16, [5, 1, 1, 9], [15, 1]):
            cache = [KVCache(1, c.n_head, c.block_size, c.head_dim) for _ in range(c.n_layer)]
            pieces = [model(piece, cache) for piece in ids.split(cuts, dim=1)]
            with naming(bias, cuts):
                torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_slopes_are_the_published_ones_for_a_window_of_256_and_scale_with_it():
    """For 8 heads they are 1/2, 1/4, ..., 1/256; for 6 those of 4, and two of 8."""
    for window, factor in ((256, 1), (128, 2), (1024, 0.25)):
        for heads, powers in ((8, range(1, 9)), (6, (2, 4, 6, 8, 1, 3))):
            config = GPTConfig(n_head=heads, positions="alibi", window=window)
            assert config.alibi_slopes == [factor * 2.0**-power for power in powers]


def test_a_wrong_configuration_names_the_field():
    for change, message in (
        (dict(n_embd=30, n_head=4), "n_embd is 30; it must be a multiple of n_head=4"),
        (dict(n_layer=0), "n_layer is 0; it must be a whole number of at least 1"),
        (dict(n_layer=10**6), "n_layer is 1000000; .* at most 4096"),
        (dict(block_size="8"), "block_size is '8'"),
        (dict(block_size=10**30, positions="alibi", window=8), "block_size is 10000"),
        (dict(vocab_size=True), "vocab_size is True"),
        (dict(dropout=1.0), "dropout is 1.0; it must be at least 0 and less than 1"),
        (dict(bias=1), "bias is 1; it must be true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**change)
