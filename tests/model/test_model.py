"""The architecture: nanoGPT's parameters, the KV cache, and every part as its attention."""

from __future__ import annotations

from functools import partial

import pytest
import tiny
import torch
from torch.nn import functional as F

from attention_ext import attention
from model.gpt import GPTConfig
from model.kv_cache import KVCache


def attend(part="part0"):
    return partial(attention, part, causal=True, br=4, bc=8)


def sdpa(q, k, v):
    Nq, Nk = q.shape[2], k.shape[2]
    mask = torch.ones(Nq, Nk, dtype=torch.bool).tril(Nk - Nq)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def caches(model, length=None):
    c = model.config
    return [KVCache(1, c.n_head, length or c.block_size, c.head_dim) for _ in range(c.n_layer)]


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_every_part_gives_the_logits_of_pytorch(part, bias):
    ids = torch.randint(11, (2, 16))
    expected = tiny.gpt(sdpa, bias=bias)(ids)
    torch.testing.assert_close(tiny.gpt(attend(part), bias=bias)(ids), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[16], [1] * 16, [5, 1, 1, 9], [15, 1]], ids=str)
def test_a_cache_changes_nothing(part, cuts):
    model = tiny.gpt(attend(part))
    ids = torch.randint(11, (1, 16))
    expected = model(ids)
    cache = caches(model)
    pieces = [model(piece, cache) for piece in ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert cache[0].length == 16


def test_parameters_have_nanogpts_names_and_number():
    model = tiny.gpt(attend(), bias=True)
    names = set(dict(model.named_parameters()))
    assert "transformer.h.1.attn.c_attn.bias" in names
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"} <= names
    assert "lm_head.weight" not in names  # it is tied to wte
    C, L, V = 16, 2, 11
    per_block = 12 * C * C + 9 * C + 4 * C  # matrices, their biases, two norms
    assert model.num_params() == L * per_block + V * C + 2 * C


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(n_embd=30, n_head=4), "n_embd is 30; it must be a multiple of n_head=4"),
        (dict(n_layer=0), "n_layer is 0; it must be a whole number of at least 1"),
        (dict(block_size="8"), "block_size is '8'"),
        (dict(vocab_size=True), "vocab_size is True"),
        (dict(dropout=1.0), "dropout is 1.0; it must be at least 0 and less than 1"),
        (dict(bias=1), "bias is 1; it must be true or false"),
    ],
)
def test_a_wrong_configuration_names_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**change)
