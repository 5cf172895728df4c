"""Log-probabilities: those of the model, in every engine, and without an effect on the texts."""

from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from steps import prefill, write
from torch.nn import functional as F

from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.logprobs import of_logits
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Writer

PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
SAMPLING = Sampling(1.3, 5, 0.9, 0.01, **PENALTIES, logit_bias=((3, 2.0),))
PROMPT = [i * i % 11 for i in range(90)]  # more than are read together


def expected(gpt, ids, top):
    """The log-probabilities of ids[1:], in float64."""
    exact = tiny.gpt(partial(F.scaled_dot_product_attention, is_causal=True), **vars(gpt.config)).double()
    with torch.inference_mode():
        logits = exact(torch.tensor([ids]))[0, :-1]
    return of_logits(logits.numpy(), ids[1:], top)


def close(given, right):
    """Whether all are as in float64; alternatives that are as likely may be in another order."""
    assert [each.token for each in given] == [each.token for each in right]
    for a, b in zip(given, right):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)
        assert all(p == pytest.approx(a.logprob, abs=1e-12) for token, p in a.top if token == a.token)


@pytest.mark.parametrize("length, top", [(1, 0), (2, 20), (90, 1)])
def test_they_are_the_models_before_any_setting(engine, length, top):
    gpt, prompt = tiny.gpt(block_size=150, vocab_size=25), PROMPT[:length]
    some = dict(max_new_tokens=40, logprobs=top, prompt_logprobs=True)
    request = Request(prompt, seed=3, sampling=SAMPLING, **some)
    ((text, tokens),) = write(Writer(engine(gpt)), request).items()
    right = expected(gpt, prompt + tokens, top)
    assert text.prompt_logprobs[0] is None
    close(text.prompt_logprobs[1:] + text.logprobs, right)
    assert all(len(each.top) == top for each in text.logprobs)
    assert len(set(tokens)) > 3


def test_they_change_no_text_and_neighbours_without_them_have_none(engine):
    gpt = tiny.gpt(block_size=150)
    first = Request([0], sampling=SAMPLING, max_new_tokens=90, context="reset")
    plain = [replace(first, ids=PROMPT[: 30 + 20 * seed], seed=seed) for seed in range(4)]
    asking = [replace(each, logprobs=each.seed, prompt_logprobs=each.seed == 2) for each in plain]
    alone = [tokens for each in plain for tokens in write(Writer(engine(gpt)), each).values()]
    mixed = list(write(Writer(engine(gpt, slots=8)), *plain, *asking).items())
    assert [tokens for _, tokens in mixed] == 2 * alone
    for text, tokens in mixed:
        wanted = tokens if text.request.logprobs is not None else []
        assert [each.token for each in text.logprobs] == wanted
        assert (text.prompt_logprobs is not None) == text.request.prompt_logprobs
    # the window has moved: they are those of the window, as the choice was
    assert all(len(each.top) == 3 for each in mixed[-1][0].logprobs)


def test_equal_alternatives_are_in_the_order_of_their_ids(extension):
    gpt = tiny.gpt(block_size=150)
    with torch.no_grad():
        for row in (1, 4, 7):
            gpt.transformer.wte.weight[row] = gpt.transformer.wte.weight[2]
    for name in ("native", "torch"):
        engine = open_engine(gpt, name)
        prefill(engine, 0, [2, 2, 2], top=5)
        equal = [[t for t, _ in top if t in (1, 2, 4, 7)] for *_, top in engine.take_logprobs(0)]
        assert len(equal) == 2 and equal == [sorted(ids) for ids in equal] and engine.take_logprobs(0) == []
