"""The torch engine's step as a graph: any texts at any lengths, with any number of rows, as without it."""

import numpy as np
import pytest
import tiny
import torch
from steps import choose, logits, prefill, write_at_random

from shakespeare.attention_ext.parts import CachePrecision
from shakespeare.attention_ext.rules import ARGUMENTS
from shakespeare.generation.engines import pytorch
from shakespeare.generation.engines.engine import EngineOptions
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling

PENALTIES = Sampling(repetition_penalty=1.3, presence_penalty=0.5)


@pytest.fixture
def no_graphs(monkeypatch) -> None:
    """Let steps run one by one where they would be captured: no GPU is needed."""
    monkeypatch.setattr(pytorch, "captured", lambda step, pool: step)


def engines(kv_cache="fp32"):
    gpt, options = tiny.gpt(), EngineOptions(part="part0", kv_cache=kv_cache, slots=5)
    return [pytorch.TorchEngine(gpt, options, graphs) for graphs in (False, True)]


@pytest.mark.parametrize("kv_cache", list(CachePrecision))
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0), Sampling(1.2, 5, 0.9, 0.02, 0.8), PENALTIES],
    ids=["plain", "greedy", "filtered", "penalties"],
)
def test_any_texts_at_any_lengths(no_graphs, kv_cache, sampling):
    plain, stepped = engines(kv_cache)
    uniforms = np.random.default_rng(0).random((9, 5))
    at = [3, 0, 4]  # the others keep what they hold
    for each in (plain, stepped):
        for slot in range(5):
            prefill(each, slot, [1 + slot] * (1 + slot))
            each.set_sampling(slot, sampling)
        each.copy(1, 2)
    expected = [choose(plain, at, row) for row in uniforms[:, :3]]
    written = []
    while len(written) < 9:
        written += stepped.write(at, uniforms[len(written) :, :3], 100).tolist()
    assert written == expected
    for slot in range(5):
        torch.testing.assert_close(logits(stepped, slot), logits(plain, slot), rtol=1e-5, atol=1e-5)
    expected = [choose(plain, range(5), row) for row in uniforms[:2]]
    assert [choose(stepped, range(5), row) for row in uniforms[:2]] == expected
    with pytest.raises(ValueError, match="slot is 4; it must be read again: it is full"):
        for row in uniforms:
            stepped.write([4], [row[:1]])


def test_texts_that_join_leave_and_slide(no_graphs):
    requests = [
        Request([1, 2], seed=1, sampling=Sampling(), max_new_tokens=40),
        Request([3], seed=2, sampling=Sampling(0.5), max_new_tokens=7),
        Request([1, 2], seed=3, sampling=PENALTIES, max_new_tokens=20),
        Request([5] * 16, seed=4, sampling=Sampling(), max_new_tokens=9, logprobs=2),
        Request([4], seed=5, sampling=Sampling(), max_new_tokens=30, context="reset"),
    ]
    plain, stepped = (write_at_random(engine, requests, 0) for engine in engines())
    assert [tokens for tokens, *_ in plain] == [tokens for tokens, *_ in stepped]


def test_part_4s_operator_gets_the_keys_of_each_text(no_graphs):
    """On CUDA the operator reads the keys within the extents, and hides those of another document there."""

    def flash(q, k, v, causal, scale, kernel, *rules):
        given = dict(zip(ARGUMENTS, rules, strict=True))
        documents = given["documents"]
        extents = given["extents"]
        assert extents.dtype == torch.int32 and extents.shape == (len(q), 2, 2) and not extents[:, 0].any()
        first, end = extents[:, 1].T[:, :, None]
        rows = torch.arange(k.shape[2])
        seen = (rows >= first) & (rows < end)
        assert torch.equal(seen, documents == documents[:, -1:])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
        return out, None

    plain, stepped = engines()
    stepped._flash = flash
    for each in (plain, stepped):
        for slot in range(4):
            prefill(each, slot, [1] * (1 + slot))
    uniforms = np.random.default_rng(0).random((9, 3))
    written = stepped.write([0, 3, 1], uniforms, 100).tolist()
    assert written == [choose(plain, [0, 3, 1], row) for row in uniforms]
