"""The architecture: tokens that continue a cache, the slopes of a model without an end, and wrong fields."""

from __future__ import annotations

import pytest
import tiny
import torch

from shakespeare.model.config import GPTConfig
from shakespeare.model.kv_cache import KVCache


@torch.no_grad()
def test_tokens_that_continue_a_cache_have_the_logits_of_the_whole_text():
    """One after the other, and several at once, which no engine does."""
    model, ids = tiny.gpt(), torch.randint(11, (1, 16))
    c = model.config
    caches = [KVCache(1, c.n_head, c.block_size, c.head_dim) for _ in range(c.n_layer)]
    pieces = [model(piece, caches) for piece in ids.split([5, 1, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), rtol=1e-4, atol=1e-4)


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
        (dict(positions="rope"), "positions is 'rope'; it must be one of table, alibi"),
        (dict(positions="alibi"), "window is None; it must be a whole number of at least 1"),
        (dict(positions="alibi", window=9999999), "window is 9999999; it must be a whole number"),
        (dict(window=5), "window is 5; it must be None with positions 'table'"),
    ):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**change)
