"""Prompts and windows that are read in slices of time: no slice and no neighbour changes a text."""

from __future__ import annotations

import random
import resource
import sys
from functools import partial

import pytest
import tiny

from attention_ext import attention
from generation.engine import open_engine
from generation.sampling import Sampling
from generation.writer import Request, Writer

USUAL = Sampling(0.8, 200)
LONGEST = 200
PENALISED = Sampling(2.0, 3, 0.9, 0.05, 1.3, 0.5, -0.5, ((2, 1.5),))
SLICES = [0.0, 5e-4]


def model(**change):
    return tiny.gpt(partial(attention, "part0", causal=True), **dict(block_size=LONGEST) | change)


@pytest.fixture(params=["native", "torch"])
def engine(request, part):
    """Open each of the engines, for each part."""
    if (part, request.param) == ("part0", "native"):
        pytest.skip("part0 has no native engine")
    return partial(open_engine, engine=request.param, part=part, br=16, bc=32)


def varied(count):
    """Requests of all kinds; some share a prompt, some outgrow their window, some want log-probabilities."""
    draw = random.Random(0)
    shared = [draw.randrange(11) for _ in range(150)]
    for seed in range(count):
        ids = [draw.randrange(11) for _ in range(draw.choice([1, 63, 65, 130, 199, 200, 230]))]
        top = draw.choice([None, None, 0, 2])
        yield Request(
            ids=shared if draw.random() < 0.4 else ids,
            seed=seed,
            sampling=draw.choice([USUAL, Sampling(0), PENALISED]),
            max_new_tokens=draw.choice([0, 3, 12, 60]),
            context=draw.choice(["slide", "reset", "reset"]),
            use_cache=draw.random() < 0.9,
            logprobs=top,
            prompt_logprobs=top is not None and draw.random() < 0.6,
        )


def finish(writer, request):
    """The tokens of a text alone, with its log-probabilities."""
    text, tokens = writer.join(request), []
    while text.remaining or text.lacks_prompt_logprobs:
        for _, more in writer.step():
            tokens += more
    writer.leave(text)
    return tokens, text.logprobs, text.prompt_logprobs


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("slice_seconds", SLICES)
def test_no_slice_and_no_neighbour_changes_a_text(engine, threads, count, slice_seconds):
    """Texts join in the middle of others' prompts, and some leave in the middle of theirs or later."""
    requests, gpt = list(varied(24)), model()
    threads(1)
    whole = Writer(engine(gpt))
    alone = [finish(whole, request) for request in requests]
    threads(count)
    draw = random.Random(1)
    writer = Writer(engine(gpt, slots=5), draw.choice([4, 5]), slice_seconds)
    waiting, growing = list(enumerate(requests)), {}
    finished = left_early = 0
    exact = writer.engine.name == "native"  # PyTorch's sums depend on the rows
    while waiting or growing:
        while waiting and writer.free and draw.random() < 0.4:
            number, request = waiting.pop(0)
            patience = draw.randrange(1, 40) if draw.random() < 0.3 else 10**6  # in steps
            growing[writer.join(request)] = number, [], [patience]
        for text, more in writer.step(draw.randrange(1, 9)):
            growing[text][1].extend(more)
        for text in list(growing):
            number, so_far, patience = growing[text]
            patience[0] -= 1
            tokens, logprobs, prompt_logprobs = alone[number]
            assert so_far == tokens[: len(so_far)] and text.new_tokens == len(so_far)
            if exact:
                assert text.logprobs == logprobs[: len(text.logprobs)]
                assert text.prompt_logprobs in (None, prompt_logprobs)
            done = not (text.remaining or text.lacks_prompt_logprobs)
            if done:
                assert so_far == tokens and len(text.logprobs) == len(logprobs)
                assert (text.prompt_logprobs is None) == (prompt_logprobs is None)
            if done or patience[0] == 0:
                finished, left_early = finished + done, left_early + (text.is_new and not done)
                writer.leave(text)
                del growing[text]
    assert writer.step() == [] and writer._reader.waiting == []
    assert finished > 10
    if slice_seconds == 0:  # else the machine's speed decides how many steps a text takes
        assert finished < 24 and (left_early > 0 or not exact)


def test_a_long_prompt_stops_no_other_text(extension, threads):
    """One piece for each step: the other text is written in all of them."""
    threads(1)
    writer = Writer(open_engine(model(block_size=500), "native", slots=2), slice_seconds=0)
    short = writer.join(Request([1], 0, USUAL))
    while short.is_new:
        writer.step()
    long = writer.join(Request([1] * 400, 0, USUAL, 5))
    steps = 0
    while [text for text, _ in writer.step(1)] == [short]:
        steps += 1
    assert steps > 20 and long.new_tokens == 1 and long.prefill_seconds > 0


def test_a_step_with_prompts_alone_returns_after_its_slice(extension, threads):
    threads(1)
    writer = Writer(open_engine(model(block_size=2000), "native", slots=2), slice_seconds=1e-5)
    texts = [writer.join(Request([seed + 1] * 1900, seed, USUAL, 3)) for seed in range(2)]
    empty = 0
    while all(text.is_new for text in texts):
        empty += writer.step() == []
    assert empty > 20


@pytest.mark.parametrize("slice_seconds", SLICES)
def test_the_shortest_prompt_overtakes_and_the_longest_goes_on(extension, threads, slice_seconds):
    threads(1)
    gpt = model(block_size=2000, n_embd=64, n_layer=6)
    writer = Writer(open_engine(gpt, "native", slots=3), slice_seconds=slice_seconds)
    long = writer.join(Request([1] * 1900, 0, USUAL, 1))
    writer.step()
    short = writer.join(Request([2, 3], 0, USUAL, 1))
    while short.remaining:
        writer.step()
    assert long.remaining == 1
    seed = 0
    while long.remaining:  # it is read although there is always a shorter one
        if writer.free:
            seed += 1
            writer.join(Request([seed % 11, seed // 11 % 11, seed // 121], seed, USUAL, 1))
        writer.step()
        for text in [text for text in writer.texts if text is not long and text.remaining == 0]:
            writer.leave(text)
    assert seed > 5


@pytest.mark.parametrize("slice_seconds", SLICES)
def test_a_prompt_that_texts_share_is_read_once(extension, threads, monkeypatch, slice_seconds):
    """Also by texts that join while it is being read; after its reader has left, another one goes on."""
    threads(1)
    engine = open_engine(model(), "native", slots=4)
    reads, begin = [], engine.prefill_begin
    monkeypatch.setattr(engine, "prefill_begin", lambda *a, **k: reads.append(a[0]) or begin(*a, **k))
    writer = Writer(engine, slice_seconds=slice_seconds)
    request = Request([1, 2] * 90, 0, USUAL, 9)
    first = writer.join(request)
    if slice_seconds == 0:
        assert writer.step() == []
        second = writer.join(request)
        assert writer.step() == []
        writer.leave(first)
        third = writer.join(request)
        assert writer.step() == [] and reads == [first.slot, second.slot]
    else:
        second, third = writer.join(request), writer.join(request)
    while third.remaining:
        for _, tokens in (step := writer.step()):
            assert tokens == step[0][1]
    assert second.remaining == 0 and len(reads) == (2 if slice_seconds == 0 else 1)


def test_leaving_in_the_middle_frees_the_memory(extension):
    """A prompt takes 6 MB here."""
    engine = open_engine(model(block_size=2000, n_embd=128, n_layer=1), "native", slots=2)
    writer = Writer(engine, slice_seconds=0)

    def begin_and_leave(times):
        for seed in range(times):
            text = writer.join(Request([seed % 11] * 2000, seed, USUAL, 3))
            assert writer.step() == []
            writer.leave(text)
            with pytest.raises(ValueError, match="given a prompt by prefill_begin"):
                engine.prefill_some(text.slot, 0)

    begin_and_leave(5)
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin_and_leave(50)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert grown < 50e6 and writer.free == 2
    assert finish(writer, Request([1] * 300, 0, USUAL, 9)) == finish(
        Writer(open_engine(model(block_size=2000, n_embd=128, n_layer=1), "native")),
        Request([1] * 300, 0, USUAL, 9),
    )


def test_the_seconds_of_a_text_are_all_since_it_joined(extension):
    writer = Writer(open_engine(model(), "native", slots=2), slice_seconds=0)
    texts = [writer.join(Request([seed] * 190, seed, USUAL, 8)) for seed in range(2)]
    while any(text.remaining for text in texts):
        writer.step(2)
    assert max(text.prefill_seconds + text.decode_seconds for text in texts) == pytest.approx(writer.seconds)
    assert all(text.prefill_seconds > 0 and text.decode_seconds > 0 for text in texts)


@pytest.mark.parametrize("wrong", [-1e-9, float("nan"), float("inf")])
def test_a_wrong_slice_is_named(wrong):
    with pytest.raises(ValueError, match=f"slice_seconds is {wrong}; it must be a number of at least 0"):
        Writer(open_engine(model(), part="part0"), slice_seconds=wrong)
