"""Generated strings: stop strings, streaming, and the same text alone or in a batch."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from support import full, naming

from shakespeare import generate, load
from shakespeare.generation.engines.engine import EngineOptions
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.many.jobs import Job
from shakespeare.generation.many.shards import Settings
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.texts import ENGINE_OPTIONS, StopFilter, complete
from shakespeare.generation.writer import Writer
from shakespeare.model.checkpoint import Checkpoint

LETTERS = tiny.VOCABULARY


def test_a_stop_string_ends_the_text_before_it():
    for stop, pieces, shown, found in (
        (["END"], ["abc", "E", "N", "x"], ["abc", "", "", "ENx"], None),
        (["END"], ["abcE", "ND", "x"], ["abc", "", ""], "END"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["b", "ab"], ["x", "a", "b"], ["x", "", ""], "ab"),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["xyz", "b"], ["axy", "b"], ["a", "xy"], "b"),
    ):
        filter = StopFilter(stop)
        assert [filter.feed(piece) for piece in pieces[: len(shown)]] == shown
        assert filter.found == found and filter.end() == ""
    filter = StopFilter(["END"])
    assert filter.feed("abcEN") == "abc" and filter.end() == "EN"  # what was held back comes at the end


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_completions_say_what_they_took_and_join_as_slots_are_free(extension, part):
    """Eight texts in two slots, and each as without a stop string and alone."""
    engine, alone, whole = open_engine(tiny.gpt(), part=part, slots=2), open_engine(tiny.gpt(), part=part), []
    for seed in range(8):
        *_, (last, _) = complete(Writer(alone), LETTERS, [Request([1], seed=seed, max_new_tokens=12 + seed)])
        whole.append(last.text)
    asked = [Request([1], seed=seed, max_new_tokens=12 + seed, stop=("a", "big")) for seed in range(8)]
    pieces = list(complete(Writer(engine), LETTERS, asked))
    samples = {completion.number: completion for completion, _ in pieces}
    assert sorted(samples) == list(range(8))
    for i, done in samples.items():
        assert done.text == "".join(text for completion, text in pieces if completion is done)
        ends = {s: whole[i].find(s) for s in ("a", "big") if s in whole[i]}
        if ends:
            first = min(ends, key=ends.__getitem__)
            assert (done.finish_reason, done.stopped_by) == ("stop", first)
            assert done.text == whole[i][: ends[first]]
            assert done.new_tokens == ends[first] + len(first)
        else:
            assert (done.finish_reason, done.stopped_by) == ("length", "")
            assert done.text == whole[i] and done.new_tokens == 12 + i
        assert done.prefill_seconds > 0 and done.decode_seconds > 0 and done.request.seed == i
    assert {done.finish_reason for done in samples.values()} == {"length", "stop"}


@pytest.mark.parametrize("ends", [(3,), (7, 3)])
def test_a_text_ends_before_an_eos_token(engine, ends):
    """Alone, in a batch with logprobs, and after windows that are read again; ignore_eos writes on."""
    gpt = tiny.gpt(eos_token_id=ends)
    asked = [Request([1], seed=seed, max_new_tokens=40, logprobs=1) for seed in range(6)]
    whole, cut = {}, {}
    for found, ignored in ((whole, True), (cut, False)):
        requests = [replace(request, ignore_eos=ignored) for request in asked]
        for done, piece in complete(Writer(engine(gpt, slots=3)), LETTERS, requests):
            if not piece:
                found[done.number] = done
    for number, text in whole.items():
        places = [at for letter in ends if (at := text.text.find(tiny.CHARACTERS[letter])) >= 0]
        length, reason = (min(places), "stop") if places else (40, "length")
        done = cut[number]
        assert (done.text, done.finish_reason, done.stopped_by) == (text.text[:length], reason, "")
        scored = [[each.token for each in found.logprobs] for found in (done, text)]
        assert done.new_tokens == length and scored[0] == scored[1][:length]
        assert text.new_tokens == 40 and text.finish_reason == "length"
    assert "stop" in {done.finish_reason for done in cut.values()}
    checkpoint, opened = Checkpoint(gpt.config, gpt.weights, LETTERS), engine(gpt)
    text = generate(checkpoint, "", 40, engine=opened, ignore_eos=True)  # begins as after a line end
    ended = min((text.partition(tiny.CHARACTERS[end])[0] for end in ends), key=len)
    assert generate(checkpoint, "\n", 40, engine=opened) == ended and len(text) == 40


def test_streams_that_share_an_engine_are_each_as_alone(engine):
    """Read in turn, and in threads; with one more text than slots a sentence says what to do."""
    checkpoint, asked = tiny.checkpoint(), [dict(seed=seed, presence_penalty=seed / 2) for seed in range(3)]
    alone = [generate(checkpoint, "ab", 40, engine=engine(checkpoint), **each) for each in asked]
    shared = engine(checkpoint, slots=2)
    streams = [generate(checkpoint, "ab", 40, engine=shared, stream=True, **each) for each in asked]
    first, second, third = streams
    written = [[next(first)], [next(second)]]
    with pytest.raises(
        ValueError, match="slots are 2, and others write in all of them; open it with slots=3"
    ):
        next(third)
    for pieces in itertools.zip_longest(first, second):
        for text, piece in zip(written, pieces):
            text.append(piece or "")
    assert ["".join(text) for text in written] == alone[:2]
    left = generate(checkpoint, "ab", 40, engine=shared, stream=True)
    next(left)
    del left  # a stream that is dropped frees its slot
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            made = threads.map(lambda each: generate(checkpoint, "ab", 40, engine=shared, **each), asked[1:])
            assert list(made) == alone[1:]


@pytest.mark.parametrize("part", ["part0", *map(full, ("part1", "part2", "part3")), "part4"])
def test_neither_the_part_nor_pytorchs_defaults_change_a_text(extension, part):
    checkpoint, options = tiny.checkpoint(), dict(engine="torch", logit_bias=((3, 1.0),), part=part)
    text = generate(checkpoint, "ab", 40, **options)
    assert text == generate(checkpoint, "ab", 40, logit_bias=((3, 1.0),))  # by the native engine
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float16)
        for weights in ("fp32", "bf16", "int8"):
            other = generate(checkpoint, "ab", 40, **options, weights=weights)
            assert weights != "fp32" or other == text
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


@pytest.fixture(scope="module")
def shakes():
    return load("shakes256")


def test_generate_gives_the_text(extension, shakes):
    text = generate(shakes, prompt="ROMEO:", max_new_tokens=200, part="part4", seed=1)
    assert isinstance(text, str) and len(text) == 200
    assert generate(shakes, prompt="ROMEO:", max_new_tokens=200, seed=2) != text
    engine = open_engine(shakes.model)
    for _ in range(2):
        assert generate(shakes, "ROMEO:", 200, engine=engine, seed=1) == text
    assert generate(shakes, "ROMEO:", 200, seed=1, stop="my") == text.split("my")[0]
    assert len(generate(shakes)) == 256
    for end in text[20], text[120]:  # with drafts
        config = replace(shakes.config, eos_token_id=shakes.tokenizer.encode(end))
        ended = generate(replace(shakes, config=config), "ROMEO:", 200, seed=1)
        assert ended == text.partition(end)[0]
    pieces = list(generate(shakes, "ROMEO:", 200, seed=1, stream=True))
    assert len(pieces) == 200 and "".join(pieces) == text


def test_numbers_of_numpy_a_model_s_name_and_none_are_taken(extension, shakes, caplog):
    text = generate(shakes, "ROMEO:", 20, seed=1)
    for number in (np.int64, np.array, torch.tensor):
        names = ("seed", "threads", "br", "bc")
        assert generate("shakes256", "ROMEO:", number(20), **dict.fromkeys(names, number(1))) == text
    names = ("stop", "context", "stream", "engine", *ENGINE_OPTIONS, "temperature")
    given = dict.fromkeys(names)
    assert generate(Path("shakes256"), "ROMEO:", 20, seed=1, **given) == text
    assert generate(shakes, None, 20, seed=None) == generate(shakes, "\n", 20, seed=1337)
    with caplog.at_level("INFO"):
        drawn = generate(shakes, max_new_tokens=-1, seed=-1)
    seed = int(caplog.messages[-1].removeprefix("seed is "))
    assert seed >= 0 and generate(shakes, seed=seed) == drawn and len(drawn) == shakes.config.block_size
    request = Request([1], seed=np.int64(2), max_new_tokens=np.array(3), logprobs=torch.tensor(1))
    assert repr(request) == repr(Request([1], seed=2, max_new_tokens=3, logprobs=1))
    request = Request([1], seed=torch.tensor(1), sampling=Sampling(np.float32(0.5)))
    settings = Settings("m", "", EngineOptions(br=np.int64(8), bc=8), request, "jsonl")
    assert Job(settings, 3).request()["seed"] == 1  # as JSON
    for wrong in (5, None, shakes.model):
        with naming(wrong), pytest.raises(TypeError, match="model is an? .*; it must be a name, a path or"):
            generate(wrong)
    assert generate(shakes, "ROMEO:", 20, stop=["\n"]) == generate(shakes, "ROMEO:", 20, stop="\n")
    with pytest.raises(TypeError, match="writer is a str; it must be Writer"):
        next(complete("shakes256", LETTERS, []))


def test_wrong_arguments_are_named_before_anything_is_written(shakes):
    for change, error, message in (
        (dict(prompt=b"A"), TypeError, "prompt is a bytes; it must be a string"),
        (dict(br="8"), TypeError, "br is a str"),
        (dict(stream=2), TypeError, "stream is an int; it must be True or False"),
        (dict(use_cache="no"), TypeError, "use_cache is a str; it must be True or False"),
        (dict(part=["part4"]), ValueError, "part is .*; it must be one of"),
        (dict(device={}), ValueError, "device is {}; it must be one of"),
        (dict(engine=5), ValueError, "engine is 5; it must be one of"),
        (dict(part="part4", draft=5), TypeError, "draft is an int; it must be 'auto', 'off', a name"),
        (dict(temprature=1.0), TypeError, r"generate\(\) got an unexpected keyword argument 'temprature'"),
        (dict(capacity=4), TypeError, r"generate\(\) got an unexpected keyword argument 'capacity'"),
        (dict(stop=3), TypeError, "stop is an int; it must be a string or several"),
    ):
        with naming(change), pytest.raises(error, match=message):
            generate(shakes, **dict(stream=True, part="part0") | change)


def test_the_writer_is_empty_however_it_ends():
    writer = Writer(open_engine(tiny.gpt(), part="part0", slots=2))
    first = complete(writer, LETTERS, [Request([1], seed=0, max_new_tokens=9)])
    next(first)
    with pytest.raises(ValueError, match="writer holds 1 texts; it must hold none"):
        next(complete(writer, LETTERS, [Request([1])]))
    first.close()
    assert writer.free == 2 and len(list(complete(writer, LETTERS, [Request([1], max_new_tokens=2)]))) == 3
