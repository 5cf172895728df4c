"""Prompts and windows that are read in slices of time: no slice and no neighbour changes a text."""

import random

import pytest
import tiny
from steps import write, write_at_random

from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Writer

LONGEST = 200
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.5)
PENALISED = Sampling(2.0, 3, 0.9, 0.05, **PENALTIES, logit_bias=((2, 1.5),))
SLICES = [0.0, 5e-4]


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
            sampling=draw.choice([Sampling(), Sampling(0), PENALISED]),
            max_new_tokens=draw.choice([0, 3, 12, 60]),
            context=draw.choice(["slide", "reset", "reset"]),
            use_cache=draw.random() < 0.9,
            logprobs=top,
            prompt_logprobs=top is not None and draw.random() < 0.6,
        )


@pytest.mark.parametrize("slice_seconds", SLICES)
def test_no_slice_and_no_neighbour_changes_a_text(engine, threads, slice_seconds):
    """Texts join in the middle of others' prompts."""
    gpt = tiny.gpt(block_size=LONGEST)
    threads(1)
    whole = Writer(engine(gpt))
    exact = whole.engine.name == "native"  # PyTorch's sums depend on the rows
    requests = list(varied(24 if exact else 12))
    alone = [item for request in requests for item in write(whole, request).items()]
    threads(2)
    found = write_at_random(engine(gpt, slots=5), requests, seed=1, slice_seconds=slice_seconds)
    for (text, tokens), (written, *logprobs) in zip(alone, found, strict=True):
        right = [text.logprobs, text.prompt_logprobs]
        assert written == tokens
        assert logprobs == right if exact else list(map(bool, logprobs)) == list(map(bool, right))


def test_a_long_prompt_stops_no_other_text(extension, threads):
    """One piece for each step: the other text is written in all of them."""
    threads(1)
    writer = Writer(open_engine(tiny.gpt(block_size=500), "native", slots=2), slice_seconds=0)
    short = writer.join(Request([1], seed=0))
    while short.is_new:
        writer.step()
    long = writer.join(Request([1] * 400, seed=0, max_new_tokens=5))
    steps = 0
    while [text for text, _ in writer.step(1)] == [short]:
        steps += 1
    assert steps > 20 and long.new_tokens == 1 and long.prefill_seconds > 0


def test_a_prompt_that_texts_share_is_read_once(extension, threads, monkeypatch):
    """Also by texts that join while it is being read; after its reader has left, another one goes on."""
    threads(1)
    engine = open_engine(tiny.gpt(block_size=LONGEST), "native", slots=4)
    reads, begin = [], engine.begin
    monkeypatch.setattr(engine, "begin", lambda *a, **k: reads.append(a[0]) or begin(*a, **k))
    writer = Writer(engine, slice_seconds=0)
    request = Request([1, 2] * 90, seed=0, max_new_tokens=9)
    first = writer.join(request)
    assert writer.step() == []
    second = writer.join(request)
    assert writer.step() == []
    writer.leave(first)
    third = writer.join(request)
    assert writer.step() == [] and reads == [first.slot, second.slot]
    while third.remaining:
        step = writer.step()
        assert all(tokens.tolist() == step[0][1].tolist() for _, tokens in step)
    assert second.remaining == 0 and len(reads) == 2
