"""Sampling and generation: one uniform number decides a token, and neither part nor cache matters."""

from __future__ import annotations

import math
from functools import partial

import pytest
import tiny
import torch

from attention_ext import attention
from model.generate import generate, sample


def model(part="part0", **change):
    return tiny.gpt(partial(attention, part, causal=True, br=4, bc=8), **change)


def test_sampling_inverts_the_cumulative_distribution():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    for uniform, token in [(0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.6001, 3)]:
        assert sample(logits, uniform) == token
    assert sample(logits, 1 - 2**-53) == 3


def test_sampling_draws_the_probabilities():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    counts = torch.bincount(torch.tensor([sample(logits, float(u), 0.7) for u in uniforms]), minlength=4)
    torch.testing.assert_close(counts / 10_000, torch.softmax(logits / 0.7, 0), atol=2e-4, rtol=0)


def test_temperature_zero_is_greedy_and_small_ones_approach_it():
    logits = torch.tensor([1.0, 3.0, 2.0])
    for temperature in (0, 1e-300, 1e-3):
        assert all(sample(logits, u, temperature) == 1 for u in (0.0, 0.5, 0.999))


def test_top_k_keeps_the_k_likeliest_and_ties():
    logits = torch.tensor([1.0, 4.0, 3.0, 3.0, 0.0])
    uniforms = [i / 997 for i in range(997)]
    for k, kept in [(1, {1}), (2, {1, 2, 3}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})]:
        assert {sample(logits, u, 1.0, k) for u in uniforms} == kept


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf])
    assert {sample(logits, u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}


def test_nan_logits_are_refused():
    for temperature in (0, 1.0):
        with pytest.raises(ValueError, match="logits hold NaN"):
            sample(torch.tensor([0.0, math.nan]), 0.5, temperature)


def windowed(gpt, prompt, count, seed):
    """nanoGPT's loop: the last block_size tokens recomputed for every token."""
    ids, generator = list(prompt), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(count):
            logits = gpt(torch.tensor([ids[-gpt.config.block_size :]]))[0, -1]
            uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
            ids.append(sample(logits, uniform, 0.8, 200))
    return ids[len(prompt) :]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 17, 40])
def test_the_text_is_nanogpts_also_past_the_block_size(part, prompt_length, use_cache):
    prompt = [i % 11 for i in range(prompt_length)]
    expected = windowed(model(), prompt, 30, seed=3)
    assert list(generate(model(part), prompt, 30, seed=3, use_cache=use_cache)) == expected
    assert len(set(expected)) > 3


def test_another_seed_gives_another_text():
    texts = {tuple(generate(model(), [0], 20, seed=seed)) for seed in range(5)}
    assert len(texts) == 5


def test_a_cached_token_costs_one_position():
    rows = []

    def counting(q, k, v):
        rows.append((q.shape[2], k.shape[2]))
        return attention("part0", q, k, v, causal=True)

    list(generate(tiny.gpt(counting, n_layer=1), [1, 2, 3], 4))
    assert rows == [(3, 3), (1, 4), (1, 5), (1, 6)]
    rows.clear()
    list(generate(tiny.gpt(counting, n_layer=1), [1, 2, 3], 4, use_cache=False))
    assert rows == [(3, 3), (4, 4), (5, 5), (6, 6)]


def test_tokens_come_one_by_one():
    calls = 0

    def counting(q, k, v):
        nonlocal calls
        calls += 1
        return attention("part0", q, k, v, causal=True)

    tokens = generate(tiny.gpt(counting, n_layer=1), [1], 10)
    assert calls == 0
    next(tokens)
    assert calls == 1
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt=[11]), "prompt has a token outside 0 .. 10"),
        (dict(max_new_tokens=-1), "max_new_tokens is -1"),
        (dict(temperature=-0.1), "temperature is -0.1"),
        (dict(temperature=math.nan), "temperature is nan"),
        (dict(top_k=0), "top_k is 0"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        generate(model(), **(dict(prompt=[0], max_new_tokens=1) | change))
