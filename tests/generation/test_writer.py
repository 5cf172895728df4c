"""The texts of a batch: no part, engine, cache or neighbour that joins or leaves changes a text."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import tiny
import torch

from attention_ext import PARTS, attention
from generation.engine import open_engine
from generation.sampling import Sampling, sample
from generation.writer import Request, Writer, uniforms

USUAL = Sampling(0.8, 200)


def model(part="part0", **change):
    return tiny.gpt(partial(attention, part, causal=True, br=4, bc=8), **change)


@pytest.fixture(
    params=[
        *((part, name) for part, row in PARTS.items() if row.operator for name in ("native", "torch")),
        ("part0", "torch"),
    ],
    ids=" ".join,
)
def engine(request):
    """Run the test for each part in each of its engines; opens an engine of a model."""
    part, name = request.param
    if PARTS[part].operator:
        request.getfixturevalue("extension")
    return lambda gpt, **change: open_engine(gpt, name, part=part, br=4, bc=8, **change)


def written(writer, *requests, most=32):
    """The tokens of requests that join together."""
    texts = {writer.join(request): [] for request in requests}
    steps = itertools.cycle(range(1, most + 1))
    while step := writer.step(limit := next(steps)):
        for text, tokens in step:
            assert 1 <= len(tokens) <= limit
            texts[text] += tokens
    for text in texts:
        writer.leave(text)
    return list(texts.values())


def tokens(engine, prompt, count, seed, **change):
    (text,) = written(Writer(engine), Request(prompt, seed, USUAL, count, **change))
    return text


def oracle(gpt, prompt, count, seed, keep):
    """A text by recomputing the window for each token. A window that is full keeps its last `keep` tokens."""
    ids, generator = list(prompt), torch.Generator().manual_seed(seed)
    start = max(0, len(ids) - gpt.config.block_size)
    with torch.no_grad():
        for _ in range(count):
            if len(ids) - start > gpt.config.block_size:
                start = len(ids) - keep
            logits = gpt(torch.tensor([ids[start:]]))[:, -1]
            uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
            ids += sample(logits, [uniform], USUAL)
    return ids[len(prompt) :]


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 17, 40])
def test_the_text_is_nanogpts_also_past_the_block_size(engine, prompt_length, use_cache):
    prompt = [i % 11 for i in range(prompt_length)]
    expected = oracle(model(), prompt, 30, seed=3, keep=16)
    assert tokens(engine(model()), prompt, 30, 3, use_cache=use_cache) == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize("prompt_length", [1, 16, 40])
def test_a_reset_context_starts_again_from_the_last_half_window(engine, prompt_length):
    prompt = [i % 11 for i in range(prompt_length)]
    expected = oracle(model(), prompt, 40, seed=3, keep=8)
    for use_cache in (True, False):
        assert tokens(engine(model()), prompt, 40, 3, context="reset", use_cache=use_cache) == expected
    assert expected != oracle(model(), prompt, 40, seed=3, keep=16)


def test_uniforms_are_those_drawn_one_by_one():
    generator = torch.Generator().manual_seed(7)
    expected = [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(600)]
    assert list(itertools.islice(uniforms(7), 600)) == expected


def test_another_seed_gives_another_text():
    texts = {tuple(tokens(open_engine(model(), part="part0"), [0], 20, seed)) for seed in range(5)}
    assert len(texts) == 5


def test_a_cached_token_costs_one_position(monkeypatch):
    rows = []

    def counting(part, q, k, v, **options):
        rows.append((q.shape[2], k.shape[2]))
        return attention(part, q, k, v, **options)

    monkeypatch.setattr("generation.engine.attention", counting)
    gpt = model(n_layer=1)
    tokens(open_engine(gpt, part="part0"), [1, 2, 3], 4, 0)
    assert rows == [(3, 3), (1, 4), (1, 5), (1, 6)]
    rows.clear()
    tokens(open_engine(gpt, part="part0"), [1, 2, 3], 4, 0, use_cache=False)
    assert rows == [(3, 3), (4, 4), (5, 5), (6, 6)]


def test_a_batch_writes_the_texts_of_one_at_a_time(engine):
    alone = [tokens(engine(model()), [1, 2], 40, seed) for seed in range(5)]
    requests = [Request([1, 2], seed, USUAL, 40) for seed in range(5)]
    assert written(Writer(engine(model(), slots=5)), *requests) == alone


@pytest.mark.parametrize("context", ["slide", "reset"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_writing_several_tokens_at_a_time_changes_nothing(engine, context, use_cache):
    requests = [Request([1, 2], seed, USUAL, 50, (), context, use_cache) for seed in (0, 1)]
    one, several = (written(Writer(engine(model(), slots=2)), *requests, most=most) for most in (1, 7))
    assert one == several and [len(text) for text in one] == [50, 50]


def varied(count):
    """Requests that differ in every field."""
    draw = random.Random(0)
    for seed in range(count):
        yield Request(
            ids=[draw.randrange(11) for _ in range(draw.choice([1, 2, 9, 16, 30]))],
            seed=seed,
            sampling=draw.choice([USUAL, Sampling(0), Sampling(2.0, 3, 0.9, 0.05, 1.3)]),
            max_new_tokens=draw.randrange(1, 40),
            context=draw.choice(["slide", "reset"]),
            use_cache=draw.random() < 0.8,
        )


def test_neighbours_that_come_and_go_change_nothing(engine):
    """Texts join when a slot is free, and some leave before their end."""
    requests = list(varied(24))
    alone = [written(Writer(engine(model())), request)[0] for request in requests]
    draw, writer, waiting = random.Random(1), Writer(engine(model(), slots=4)), list(enumerate(requests))
    growing, left = {}, 0
    while waiting or growing:
        while waiting and writer.free and draw.random() < 0.7:
            number, request = waiting.pop(0)
            growing[writer.join(request)] = number, []
        for text, more in writer.step(draw.randrange(1, 9)):
            growing[text][1].extend(more)
        for text in list(growing):
            number, so_far = growing[text]
            assert so_far == alone[number][: len(so_far)] and text.new_tokens == len(so_far)
            if text.remaining == 0 or draw.random() < 0.05:
                left += text.remaining > 0
                writer.leave(text)
                del growing[text]
    assert left > 0 and writer.free == 4 and writer.step() == []


def test_texts_have_lengths_of_their_own():
    writer = Writer(open_engine(model(), part="part0", slots=3))
    texts = written(writer, *(Request([1], 5, USUAL, count) for count in (3, 0, 20)))
    assert [len(text) for text in texts] == [3, 0, 20] and texts[2][:3] == texts[0]


@pytest.mark.parametrize("kept", [False, True], ids=["all slots", "one keeps the prompt"])
def test_a_prompt_that_texts_share_is_read_once(monkeypatch, kept):
    """Once for texts that join together; if a slot keeps the prompt, also for texts that join later."""
    engine = open_engine(model(), part="part0", slots=3)
    reads = []
    monkeypatch.setattr(engine, "prefill", lambda *a, f=engine.prefill, **k: reads.append(a[1]) or f(*a, **k))
    writer = Writer(engine, 2 if kept else 3)
    first = [written(writer, Request([1, 2], 0, USUAL, 5), Request([1, 2], 1, USUAL, 5)) for _ in range(2)]
    assert first[0] == first[1] and reads == [[1, 2]] * (1 if kept else 2)
    other = written(writer, Request([3], 0, USUAL, 5))
    assert reads[-1] == [3]
    assert written(writer, Request([3], 0, USUAL, 5)) == other


def test_the_seconds_of_a_text_are_those_since_it_joined():
    writer = Writer(open_engine(model(), part="part0", slots=2))
    first = writer.join(Request([1] * 16, 0, USUAL, 8))
    writer.step(2)
    before = writer.seconds
    second = writer.join(Request([2], 0, USUAL, 3))
    while writer.step(1):
        pass
    assert first.prefill_seconds > 0 and first.decode_seconds > 0
    assert first.prefill_seconds + first.decode_seconds == pytest.approx(writer.seconds)
    assert 0 < second.prefill_seconds + second.decode_seconds <= writer.seconds - before


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(ids=[]), ValueError, "prompt is empty"),
        (dict(seed=-1), ValueError, "seed is -1"),
        (dict(seed=2**64), ValueError, r"seed is \d+; it must be at least 0 and less than 2\*\*64"),
        (dict(seed="1"), TypeError, "seed is a str; it must be a whole number"),
        (dict(max_new_tokens=-1), ValueError, "max_new_tokens is -1"),
        (dict(max_new_tokens=1.0), TypeError, "max_new_tokens is a float"),
        (dict(stop=("a", "")), ValueError, "stop is "),
        (dict(stop=(1,)), ValueError, "stop is "),
        (dict(context="forget"), ValueError, "context is 'forget'; it must be one of slide, reset"),
    ],
)
def test_a_wrong_request_is_named(change, error, message):
    with pytest.raises(error, match=message):
        Request(**dict(ids=[0]) | change)


def test_what_a_writer_cannot_take_is_named():
    engine = open_engine(model(), part="part0", slots=2)
    writer = Writer(engine)
    with pytest.raises(ValueError, match="prompt has a token outside 0 .. 10"):
        writer.join(Request([11]))
    with pytest.raises(ValueError, match="logit_bias has token 11; it must be from 0 to 10"):
        writer.join(Request([1], sampling=Sampling(logit_bias=((10, 1), (11, 1)))))
    assert writer.free == 2
    text = writer.join(Request([1]))
    writer.join(Request([1]))
    with pytest.raises(ValueError, match="no free slot"):
        writer.join(Request([1]))
    writer.leave(text)
    with pytest.raises(ValueError):
        writer.leave(text)
    for texts in (0, 3):
        with pytest.raises(ValueError, match=f"texts is {texts}; it must be from 1 to 2"):
            Writer(engine, texts)
