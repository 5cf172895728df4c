"""How many texts of a batch go through a step together: Decoder.group_size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ext.extension import load_decoder

MB = 1 << 20
# A text of shakes256 with 220 tokens in float32, beside the model's weights.
USUAL = dict(weight_bytes=3.2e6, text_bytes=9e5, cache_bytes=32 * MB, threads=1, rows=4)


@pytest.fixture
def size(extension):
    def size(texts=32, **change):
        return load_decoder().group_size(texts, **USUAL | change)

    return size


def test_a_group_is_what_the_cache_holds(size):
    assert size(cache_bytes=1 << 40) == 32  # all fits, and weights are read once for all
    assert 4 <= size() < 32
    assert size(text_bytes=4.5e5) == 2 * size()  # a cache in bf16
    assert size(text_bytes=32 * MB / 3 - 3.3e6) == 1  # one long text takes the whole cache
    assert size(threads=2) == size() / 2  # they share the cache


def test_if_nothing_stays_in_the_cache_the_weights_are_read_once(size):
    assert size(weight_bytes=500e6) == 32
    assert size(cache_bytes=1) == 32


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    texts=st.integers(1, 600),
    rows=st.sampled_from([1, 4, 8]),
    threads=st.integers(1, 64),
    weight_bytes=st.floats(1, 1e11),
    text_bytes=st.floats(1, 1e10),
    cache_bytes=st.floats(1, 1e10),
)
def test_a_group_fills_register_blocks(texts, rows, **traffic):
    chosen = load_decoder().group_size(texts, rows=rows, **traffic)
    assert 1 <= chosen <= texts
    assert chosen == texts or chosen % rows == 0 or chosen & (chosen - 1) == 0 and chosen < rows
