"""Drafts change no text: in every part, whatever they guess, for any settings, alone and among others."""

import itertools
import math
import random
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest
import safetensors.numpy
import tiny
import torch
from steps import prefill, write_at_random
from support import full, or_skip

from shakespeare.attention_ext.parts import PARTS
from shakespeare.generation import draft_maker as maker
from shakespeare.generation.engines import native
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.model import draft as drafts
from shakespeare.model import load
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.draft import Draft, code_points

PARTS_HERE = [name for name, part in PARTS.items() if part.operator]
# Texts of a case in each batch: in the default tests, and in the full set.
FEW, MANY = 2, 13


@pytest.fixture(scope="module")
def model(extension) -> Checkpoint:
    return tiny.checkpoint(block_size=40)


def certain(token: int) -> Draft:
    """What guesses one token, after any token."""
    tags = np.zeros((drafts.BUCKETS, drafts.WAYS), np.uint32)
    pairs = np.zeros((*tags.shape, drafts.LISTED, 2), np.uint8)
    for hash in drafts.hashes(np.arange(len(tiny.VOCABULARY)), 1).tolist():
        bucket = hash >> drafts.BUCKET_SHIFT
        way = np.flatnonzero(tags[bucket] == 0)[0]
        tags[bucket, way] = hash >> drafts.TAG_SHIFT & 0xFFFFFFFF
        pairs[bucket, way, 0] = token, 255
    return Draft(code_points(tiny.VOCABULARY), tags, pairs)


def scrambled(draft: Draft) -> Draft:
    """The same contexts with other tokens and probabilities."""
    rng = np.random.default_rng(1)
    pairs = np.stack([rng.integers(limit, size=draft.pairs.shape[:3]) for limit in (11, 256)], axis=-1)
    return replace(draft, pairs=pairs.astype(np.uint8))


def kinds_of(model: Checkpoint) -> dict[str, Draft]:
    own = maker.make(model, maker.own_text(model, 400))
    return {"own": own, "scrambled": scrambled(own), "certain": certain(3)}


@pytest.fixture(scope="module")
def kinds(model) -> dict[str, Draft]:
    return kinds_of(model)


def test_each_place_has_what_the_model_expects_there(extension):
    """The probabilities after at least a quarter of a window, and at most a whole, for any block size."""
    for block in (2, 3, 4, 5, 6, 7, 8, 12):
        gpt = tiny.gpt(block_size=block)
        text = np.random.default_rng(block).integers(11, size=29)
        tokens, shares = maker._expected(tiny.checkpoint(block_size=block), text, math.inf)
        for at in range(1, len(text)):
            firsts = range(max(0, at - block), max(0, at - max(1, block // 4)) + 1)
            possible = [gpt(torch.tensor(text[None, first:at]))[0, -1].softmax(0) for first in firsts]
            near = [np.allclose(p[tokens[at].tolist()].detach(), shares[at], atol=1e-4) for p in possible]
            assert any(near), (block, at)
    for length in range(1, drafts.ORDER + 2):
        maker.make(tiny.checkpoint(), [1] * length)


def any_request(rng: random.Random, vocab: int, longest: int) -> Request:
    """A text with any settings; some slide or restart their window."""
    some = rng.random() < 0.5
    sampling = Sampling(
        temperature=rng.choice([0, 0.5, 0.8, 1.0, 1.5]),
        top_k=rng.choice([None, None, 1, 3]),
        top_p=rng.choice([1, 0.9, 0.3]) if some else 1,
        min_p=rng.choice([0, 0.1]) if some else 0,
        typical_p=rng.choice([1, 0.5]) if some else 1,
        repetition_penalty=rng.choice([1, 1.3, 0.7]) if some else 1,
        presence_penalty=rng.choice([0, 0.5]) if some else 0,
        frequency_penalty=rng.choice([0, 0.5, -0.5]) if some else 0,
        logit_bias=((rng.randrange(vocab), rng.choice([3.0, -3.0])),) if rng.random() < 0.3 else (),
    )
    return Request(
        [rng.randrange(vocab) for _ in range(rng.randint(1, longest))],
        seed=rng.randrange(2**40),
        sampling=sampling,
        max_new_tokens=rng.randint(1, longest),
        context=rng.choice(["slide", "reset"]),
        logprobs=rng.choice([None, None, 2]),
    )


def same(model: Checkpoint, draft: Draft, count: int, seed: int, **options) -> None:
    """Check that texts with and without a draft are the same, in batches of one to five."""
    rng = random.Random(seed)
    for slots in (1, 2, 5):
        longest = min(48, model.config.block_size + 8)
        requests = [any_request(rng, model.config.vocab_size, longest) for _ in range(count)]
        some = dict(slots=slots, **options)
        without, among = (open_engine(model, draft=each, **some) for each in ("off", draft))
        expected = write_at_random(without, requests, seed)
        assert write_at_random(among, requests, seed + 1) == expected  # other neighbours, too
        assert write_at_random(without, requests, seed + 2) == expected


@pytest.mark.parametrize("kind", ["own", "scrambled", "certain"])
@pytest.mark.parametrize("part", PARTS_HERE)
def test_a_draft_changes_no_text(part, kind, model, kinds):
    same(model, kinds[kind], FEW, 0, part=part, threads=1)


@pytest.mark.parametrize("options", [{"kv_cache": "bf16"}, {"weights": "int8"}, {"threads": 2}], ids=str)
def test_nor_in_other_precisions_and_over_threads(options, model, kinds):
    same(model, kinds["own"], FEW, 1, **options)


@pytest.mark.parametrize(
    "threads, blocks, kind, change, precision",
    [
        (64, 4, "own", {}, "fp32"),
        full(64, 8, "scrambled", dict(n_head=1, bias=True), "bf16"),
        full(128, 8, "own", dict(n_embd=48, n_head=6), "bf16"),
        full(256, 8, "certain", dict(n_embd=64, n_head=16), "fp32"),
    ],
    ids=str,
)
def test_nor_in_the_cuda_engine(emulated, monkeypatch, threads, blocks, kind, change, precision):
    """On the CPU; rows of guesses add in another order than a row alone."""
    model = tiny.checkpoint(block_size=60, **change)
    draft = kinds_of(model)[kind]
    emulated(monkeypatch, threads, (blocks,))
    rng, rounded = random.Random(0), dict(weights=precision, kv_cache=precision)
    plain = dict(repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias=())
    for slots in (1, 2):
        some = [any_request(rng, 11, 30) for _ in range(4)]
        requests = [
            replace(each, max_new_tokens=25, context="reset", sampling=replace(each.sampling, **change))
            for each, change in zip(some, (plain, plain, plain, {}))  # rows of guesses know no penalties
        ]
        expected = write_at_random(open_engine(model, slots=slots, draft="off", **rounded), requests, 0)
        engine = open_engine(model, "cuda", device="cuda", slots=slots, draft=draft, **rounded)
        counts, plain_launch = [], engine._launch

        def counted(launch, *rest):
            chosen = plain_launch(launch, *rest)
            if launch.drafts:
                counts.append((chosen.size, *engine._counted.sum(0).tolist()))
            return chosen

        monkeypatch.setattr(engine, "_launch", counted)
        found = write_at_random(engine, requests, 1, seconds=100)
        for (tokens, logprobs, _), (other, others, _) in zip(found, expected):
            assert tokens == other
            assert [each.token for each in logprobs] == [each.token for each in others]
            assert [each.logprob for each in logprobs] == pytest.approx([e.logprob for e in others], abs=1e-3)
        tokens, passes, guesses = map(sum, zip(*counts))
        assert 0 < tokens - passes <= guesses  # hits


def test_when_the_cuda_engine_has_drafts(emulated, monkeypatch):
    emulated(monkeypatch, 64, (4,))
    checkpoint = tiny.checkpoint(block_size=60)
    engine = open_engine(checkpoint, "cuda", device="cuda", draft=certain(3))
    expected = open_engine(checkpoint, draft="off")
    uniforms = np.random.default_rng(0).random((60, 1))

    def drafted(count: int, sampling: Sampling | None = None) -> bool:
        """Write so many tokens, of a new text with these settings or of the same; whether with drafts."""
        for each in (engine, expected) if sampling else ():
            each.set_sampling(0, sampling)
            prefill(each, 0, [1])
        has_drafts = engine._launch_for(np.array([0])).drafts
        found, other = (each.write([0], uniforms[:count], 100) for each in (engine, expected))
        assert len(found) == count and np.array_equal(found, other)
        return has_drafts

    assert drafted(45, Sampling())
    assert not drafted(5)  # too many guesses of the text have missed
    assert drafted(5, Sampling(1e300))
    assert not drafted(5, Sampling(presence_penalty=0.5))


@pytest.mark.full
@pytest.mark.parametrize("kv_cache", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "part, simd",
    [*((part, "portable") for part in PARTS_HERE), *itertools.product(["part4"], ["ispc", "off"])],
)
def test_many_texts_are_the_same(part, simd, kv_cache, model, kinds):
    """12 cases of 117 texts of the tiny model and 36 of a shipped one: 1,836 in all."""
    with or_skip():
        native.library(simd)
    drafts = [*kinds.values()]
    for seed, weights in enumerate(("fp32", "bf16", "int8")):
        draft = drafts[seed - (kv_cache == "bf16")]  # each kind of cache pairs them another way
        same(model, draft, MANY, seed, part=part, simd=simd, kv_cache=kv_cache, weights=weights)
    shakes = load("shakes128")
    assert shakes.draft
    same(shakes, shakes.draft, 12, 7, part=part, simd=simd, kv_cache=kv_cache)


def test_the_draft_of_a_model_hits(model, kinds):
    engine = open_engine(model, slots=1, draft=kinds["own"], threads=1)
    engine.record(True)
    steps = []
    for _ in range(5):  # on a busy machine more guesses seem not to pay
        write_at_random(engine, [Request([0], seed=seed, max_new_tokens=39) for seed in range(20)], 0)
        steps.append(sum(kind == "draft" for kind, *_ in engine.spans()))
    assert 0 < min(steps) < 0.75 * 20 * 39


def test_a_draft_holds_no_rare_context(model):
    """Each pair of tokens occurs once in this text, so only single tokens are contexts."""
    V = len(tiny.VOCABULARY)
    text = [token for i in range(V) for token in (i, *(each for j in range(i + 1, V) for each in (i, j)))]
    assert 0 < np.count_nonzero(maker.make(model, text).pairs[..., 1].any(2)) <= V


def test_a_long_text_gives_pieces_from_all_of_it(monkeypatch):
    monkeypatch.setattr(maker, "MOST_READ", 6)
    monkeypatch.setattr(maker, "PIECE", 2)
    assert maker.excerpt("abcdef") == "abcdef"
    assert maker.excerpt("abcdefghijkl") == "abfgkl"


def test_drafts_that_do_not_fit_are_refused(model, kinds, tmp_path):
    own = kinds["own"]
    for change, message in (
        (dict(tags=own.tags[1:]), r"tags is uint32 \(8191, 4\); it must be uint32 \(8192, 4\)"),
        (dict(pairs=own.pairs.astype(np.int8)), "pairs is int8 .*; it must be uint8 "),
        (dict(pairs=np.full_like(own.pairs, 11)), "a token is outside its vocabulary"),
        (dict(tags=np.broadcast_to(own.tags[:1], own.tags.shape)), "tags has gaps"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(own, **change)
    one_more = replace(own, vocabulary=np.arange(12, dtype=np.uint32))
    with pytest.raises(ValueError, match="draft has a vocabulary of 12; it must be the model's, 11"):
        open_engine(model, draft=one_more)
    old = dict(first=np.ones(11), starts=np.zeros(3), records=np.zeros(0))
    made = "it holds other tensors; 'gpt.py draft' makes a new one"
    for tensors, message in ((old, made), (asdict(one_more), "it is for another vocabulary")):
        safetensors.numpy.save_file(tensors, tmp_path / drafts.FILE)
        with pytest.raises(drafts.DraftError, match=f"{drafts.FILE} is no draft for this model: {message}"):
            open_engine(model, draft=str(tmp_path))
    for value, engine in (("nowhere", "native"), ("shakes128", "native"), (own, "torch")):
        with pytest.raises(ValueError, match="draft"):
            open_engine(model, engine, draft=value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_engine(model, draft="auto").draft is None
        assert open_engine(model, "torch", draft="auto")
