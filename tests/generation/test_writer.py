"""The texts of a batch: no part, engine or cache changes a text; prompts that are shared; wrong requests."""

from unittest.mock import Mock

import pytest
import tiny
import torch
from oracle import sample
from steps import write
from support import naming

from shakespeare.attention_ext import attention
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Writer


def tokens(engine, prompt, count, seed, **change):
    request = Request(prompt, seed=seed, max_new_tokens=count, **change)
    (written,) = write(Writer(engine), request).values()
    return written


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
            ids += sample(logits, [uniform])
    return ids[len(prompt) :]


@pytest.mark.parametrize("context, keep", [("slide", 16), ("reset", 8)])
def test_the_text_is_nanogpts_also_past_the_block_size(engine, context, keep):
    """A reset context starts again from the last half window."""
    for length in (1, 5, 16, 17, 40):
        prompt = [i % 11 for i in range(length)]
        expected = oracle(tiny.gpt(), prompt, 40, seed=3, keep=keep)
        assert len(set(expected)) > 3
        for use_cache in (True, False):
            found = tokens(engine(tiny.gpt()), prompt, 40, 3, context=context, use_cache=use_cache)
            assert found == expected, (length, use_cache)


def test_a_cached_token_costs_one_position(monkeypatch):
    cached, whole = [(3, 3), (1, 4), (1, 5), (1, 6)], [(3, 3), (4, 4), (5, 5), (6, 6)]
    for use_cache, expected in ((True, cached), (False, whole)):
        counted = Mock(wraps=attention)
        monkeypatch.setattr("shakespeare.generation.engines.pytorch.attention", counted)
        tokens(open_engine(tiny.gpt(n_layer=1), part="part0"), [1, 2, 3], 4, 0, use_cache=use_cache)
        calls = [call.args for call in counted.call_args_list]
        assert [(q.shape[2], k.shape[2]) for _, q, k, _ in calls] == expected


@pytest.mark.parametrize("kept", [False, True], ids=["all slots", "one keeps the prompt"])
def test_a_prompt_that_texts_share_is_read_once(monkeypatch, kept):
    """Once for texts that join together; if a slot keeps the prompt, also for texts that join later."""
    engine = open_engine(tiny.gpt(), part="part0", slots=3)
    reads = []
    monkeypatch.setattr(engine, "begin", lambda *a, f=engine.begin: reads.append(a[1]) or f(*a))
    writer = Writer(engine, 2 if kept else 3)
    both = [Request([1, 2], seed=seed, max_new_tokens=5) for seed in (0, 1)]
    first = [list(write(writer, *both).values()) for _ in range(2)]
    assert first[0] == first[1] and reads == [[1, 2]] * (1 if kept else 2)
    other = [list(write(writer, Request([3], max_new_tokens=5)).values()) for _ in range(2)]
    assert other[0] == other[1] and [3] in reads


def test_a_wrong_request_is_named():
    for change, error, message in (
        (dict(ids=[]), ValueError, "prompt is empty"),
        (dict(seed=2**64), ValueError, r"seed is \d+; it must be at least 0 and less than 2\*\*64"),
        (dict(seed="1"), TypeError, "seed is a str; it must be a whole number"),
        (dict(max_new_tokens=-1), ValueError, "max_new_tokens is -1"),
        (dict(max_new_tokens=1.0), TypeError, "max_new_tokens is a float"),
        (dict(stop=("a", "")), ValueError, "stop is "),
        (dict(stop=(1,)), ValueError, "stop is "),
        (dict(context="forget"), ValueError, "context is 'forget'; it must be one of slide, reset"),
        (dict(logprobs=21), ValueError, "logprobs is 21; it must be from 0 to 20"),
        (dict(logprobs=True), TypeError, "logprobs is a bool; it must be a whole number"),
        (dict(prompt_logprobs=True), ValueError, "prompt_logprobs is True; it must be False"),
        (dict(logprobs=0, prompt_logprobs="1"), TypeError, "prompt_logprobs is a str; it must be"),
    ):
        with naming(change), pytest.raises(error, match=message):
            Request(**dict(ids=[0]) | change)


def test_what_a_writer_cannot_take_is_named():
    engine = open_engine(tiny.gpt(), part="part0", slots=2)
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
