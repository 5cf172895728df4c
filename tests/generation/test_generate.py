"""Writing text: neither part, engine, cache nor batch changes it; it ends where it is told to."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import tiny
import torch

from attention_ext import PARTS, attention
from generation.engine import open_engine
from generation.generate import Completion, StopFilter, Writer, complete, uniforms
from generation.sampling import Sampling, sample
from model import generate, load
from model.tokenizer import CharTokenizer

USUAL = Sampling(0.8, 200)


def model(part="part0", **change):
    return tiny.gpt(partial(attention, part, causal=True, br=4, bc=8), **change)


@pytest.fixture(
    params=[(part, name) for part in PARTS for name in ("native", "torch") if part != "part0"]
    + [("part0", "torch")],
    ids=" ".join,
)
def engine(request):
    """Every part in every engine that it has."""
    part, name = request.param
    if part != "part0":
        request.getfixturevalue("extension")
    return lambda gpt, **change: open_engine(gpt, name, part=part, br=4, bc=8, **change)


def tokens(engine, prompt, count, seed, **change):
    writer = Writer(engine, prompt, [seed], USUAL, **change)
    return [writer.next([0])[0] for _ in range(count)]


def oracle(gpt, prompt, count, seed, keep):
    """The window recomputed for every token; past the block size its last `keep(length)` tokens."""
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
    writer = Writer(engine(model(), slots=5), [1, 2], range(5), USUAL)
    together = [writer.next(range(5)) for _ in range(40)]
    assert [list(text) for text in zip(*together)] == alone


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompt=[]), "prompt is empty"),
        (dict(prompt=[11]), "prompt has a token outside 0 .. 10"),
        (dict(seeds=[]), "seeds are 0; they must be 1 to 2"),
        (dict(seeds=[1, 2, 3]), "seeds are 3"),
        (dict(seeds=[-1]), "seed is -1"),
        (dict(context="forget"), "context is 'forget'; it must be one of slide, reset"),
    ],
)
def test_a_writers_wrong_arguments_are_named(change, message):
    engine = open_engine(model(), part="part0", slots=2)
    with pytest.raises(ValueError, match=message):
        Writer(**dict(engine=engine, prompt=[0], seeds=[0], sampling=USUAL) | change)


@pytest.mark.parametrize(
    "stop, pieces, shown, found",
    [
        (["END"], ["abc", "E", "N", "x"], ["abc", "", "", "ENx"], None),
        (["END"], ["abcE", "ND", "x"], ["abc", "", ""], "END"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["b", "ab"], ["x", "a", "b"], ["x", "", ""], "ab"),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["xyz", "b"], ["axy", "b"], ["a", "xy"], "b"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(stop, pieces, shown, found):
    filter = StopFilter(stop)
    assert [filter.feed(piece) for piece in pieces[: len(shown)]] == shown
    assert filter.found == found
    assert filter.end() == ""


def test_what_is_held_back_comes_at_the_end():
    filter = StopFilter(["END"])
    assert filter.feed("abcEN") == "abc" and filter.end() == "EN"


@pytest.mark.parametrize("stop", [[""], ["a", ""], [1]])
def test_wrong_stop_strings_are_named(stop):
    with pytest.raises(ValueError, match="stop is "):
        StopFilter(stop)


def test_completions_say_what_they_took():
    tokenizer = CharTokenizer(tiny.CHARACTERS)
    engine = open_engine(model(), part="part0", slots=3)
    samples = [Completion(seed) for seed in (0, 4, 5)]
    pieces = list(complete(Writer(engine, [1], (0, 4, 5), USUAL), tokenizer, samples, 12, ["a", "big"]))
    for i, done in enumerate(samples):
        assert done.text == "".join(text for n, text in pieces if n == i)
        whole = "".join(tokenizer.characters[t] for t in tokens(engine, [1], 12, done.seed))
        ends = {s: whole.find(s) for s in ("a", "big") if s in whole}
        if ends:
            first = min(ends, key=ends.__getitem__)
            assert (done.finish_reason, done.stopped_by) == ("stop", first)
            assert done.text == whole[: ends[first]]
            assert done.new_tokens == ends[first] + len(first)
        else:
            assert (done.finish_reason, done.stopped_by) == ("length", "")
            assert done.text == whole and done.new_tokens == 12
        assert done.prefill_seconds > 0 and done.decode_seconds > 0
    assert {done.finish_reason for done in samples} == {"length", "stop"}


@pytest.fixture(scope="module")
def shakes():
    return load("shakes256")


def test_generate_gives_the_text(extension, shakes):
    text = generate(shakes, prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1)
    assert isinstance(text, str) and len(text) == 200
    for change in (dict(part="part0"), dict(engine="torch"), dict(part="part2", br=3), dict(use_cache=False)):
        assert generate(shakes, prompt="ROMEO:", max_new_tokens=200, seed=1, **change) == text
    assert generate(shakes, prompt="ROMEO:", max_new_tokens=200, seed=2) != text
    engine = open_engine(shakes.model)
    for _ in range(2):
        assert generate(shakes, "ROMEO:", 200, engine=engine, seed=1) == text
    assert generate(shakes, "ROMEO:", 200, seed=1, stop="my") == text.split("my")[0]
    assert len(generate(shakes)) == 256


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompt=b"A"), "prompt is a bytes; it must be a string"),
        (dict(max_new_tokens=2.5), "max_new_tokens is a float; it must be a whole number"),
        (dict(seed="1"), "seed is a str"),
        (dict(br="8"), "br is a str"),
        (dict(temperature="1"), "temperature is a str"),
    ],
)
def test_generates_arguments_of_a_wrong_type_are_named(shakes, change, message):
    with pytest.raises(TypeError, match=message):
        generate(shakes, **dict(part="part0") | change)


def test_an_engine_of_another_model_is_refused(shakes):
    with pytest.raises(ValueError, match="engine was opened for another model"):
        generate(shakes, engine=open_engine(model(), part="part0"))


@pytest.mark.parametrize("context", ["slide", "reset"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_writing_several_tokens_at_a_time_changes_nothing(engine, context, use_cache):
    one, several = (
        Writer(engine(model(), slots=2), [1, 2], (0, 1), USUAL, context, use_cache) for _ in range(2)
    )
    expected = [one.next([0, 1]) for _ in range(50)]
    steps, most = [], 0
    while len(steps) < 50:
        most = most % 7 + 1
        made = several.write([0, 1], min(most, 50 - len(steps)))
        assert 1 <= len(made) <= most
        steps += made
    assert steps == expected


def test_samples_that_stop_in_the_middle_of_a_step_of_several(extension):
    """The engine is ahead of the stop string; neither that text nor the others have more for it."""
    tokenizer = CharTokenizer(tiny.CHARACTERS)
    seeds = range(6)

    def written(chosen):
        samples = [Completion(seed) for seed in chosen]
        writer = Writer(open_engine(model(), "native", slots=6), [1], list(chosen), USUAL)
        list(complete(writer, tokenizer, samples, 60, ["a", "big"]))
        return [(sample.text, sample.finish_reason, sample.new_tokens) for sample in samples]

    together = written(seeds)
    assert together == [written([seed])[0] for seed in seeds]
    assert len({count for *_, count in together}) > 2


def test_a_batch_reads_its_prompt_once(monkeypatch):
    engine = open_engine(model(), part="part0", slots=3)
    reads = []
    monkeypatch.setattr(engine, "prefill", lambda *a, f=engine.prefill, **k: reads.append(a[0]) or f(*a, **k))
    writer = Writer(engine, [1, 2], range(3), USUAL)
    for _ in range(5):
        writer.next(range(3))
    assert reads == [0]


def test_generate_streams(extension, shakes):
    pieces = generate(shakes, "ROMEO:", 30, seed=1, stream=True)
    assert next(pieces) and len([*pieces]) == 29
    streamed = generate(shakes, "ROMEO:", 30, seed=1, stream=True)
    assert "".join(streamed) == generate(shakes, "ROMEO:", 30, seed=1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(prompt=""), "prompt is empty"),
        (dict(prompt="日"), "the model does not know 1 of the text's characters: '日'"),
        (dict(max_new_tokens=-1), "max_new_tokens is -1"),
        (dict(temperature=-1), "temperature is -1"),
        (dict(part="part7"), "part is 'part7'"),
        (dict(engine="onnx"), "engine is 'onnx'"),
        (dict(stop=""), "stop is "),
        (dict(context="x"), "context is 'x'"),
        (dict(seed=-1), "seed is -1"),
    ],
)
def test_generates_wrong_arguments_are_named_before_anything_is_written(shakes, change, message):
    with pytest.raises(ValueError, match=message):
        generate(shakes, **dict(stream=True, part="part0") | change)


def test_tokens_come_one_by_one(shakes):
    reads = 0

    def counting(*arguments, **named):
        nonlocal reads
        reads += 1
        return right(*arguments, **named)

    engine = open_engine(shakes.model, part="part0")
    right, engine.prefill = engine.prefill, counting
    pieces = generate(shakes, "A", 10, engine=engine, stream=True, use_cache=False)
    assert reads == 0
    next(pieces)
    assert reads == 1
    assert not torch.is_inference_mode_enabled()
