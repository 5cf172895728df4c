"""The torch engine's step as a graph: any texts at any lengths, with any number of rows, as without it."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from steps import choose, logits, prefill, write_at_random
from support import full

from shakespeare.attention_ext.parts import PARTS, CachePrecision, Dtype
from shakespeare.generation.engines import graph, pytorch
from shakespeare.generation.engines.engine import EngineOptions
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling

PENALTIES = Sampling(repetition_penalty=1.3, presence_penalty=0.5)


@pytest.fixture
def no_graphs(monkeypatch) -> None:
    """Let steps run one by one where they would be captured: no GPU is needed."""

    def uncaptured(self, texts, sampling):
        return SimpleNamespace(replay=lambda: self._step(texts, sampling))

    monkeypatch.setattr(graph.Graphs, "_graph", uncaptured)


def engines(kv_cache="fp32"):
    gpt, options = tiny.gpt(), EngineOptions(part="part0", kv_cache=kv_cache, slots=5)
    return [pytorch.TorchEngine(gpt, options, part) for part in (None, options.row)]


@pytest.mark.parametrize("kv_cache", list(CachePrecision))
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0), Sampling(1.2, 5, 0.9, 0.02, 0.8), PENALTIES],
    ids=["plain", "greedy", "filtered", "on the host"],
)
def test_any_texts_at_any_lengths(no_graphs, kv_cache, sampling):
    plain, stepped = engines(kv_cache)
    uniforms = np.random.default_rng(0).random((9, 5))
    at = [3, 0, 4]  # fewer than a power of two; the others keep what they hold
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
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in stepped]


def test_a_nan_is_an_error(no_graphs):
    engine = engines()[1]
    prefill(engine, 0, [1])
    choose(engine, [0], [0.5])
    engine.model.lm_head.weight = torch.nn.Parameter(torch.full_like(engine.model.lm_head.weight, torch.nan))
    with pytest.raises(ValueError, match="logits hold NaN"):
        engine.write([0], [[0.5]])


def test_which_parts_it_serves():
    wide, odd, usual = (tiny.gpt(n_head=1, n_embd=d, n_layer=1).config for d in (132, 30, 32))
    part0, part4 = PARTS["part0"], PARTS["part4"]
    assert all(graph.serves(config, part0, None) for config in (wide, odd, usual))
    assert [graph.serves(config, part4, None) for config in (wide, odd, usual)] == [False, False, True]
    assert not graph.serves(usual, part4, "5")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability", [(7, 5), full((10, 0))], ids=str)
def test_its_attention_compiles_without_spilling(capability):
    for head_dim, dtype, threads in ((32, Dtype.FP32, graph.SMALL), (80, Dtype.BF16, graph.LARGE)):
        _, found = graph.source(head_dim, dtype, threads, capability).compile()
        assert 0 < found.registers <= 128 and found.spill_stores == 0, (head_dim, found)
