"""Sampling: the filters, then one uniform number that decides the token."""

import itertools
import math

import numpy as np
import pytest
import torch
from oracle import sample
from support import naming

from shakespeare.generation.sampling import Sampling, Uniforms

PLAIN = dict(temperature=1.0, top_k=None)
UNIFORMS = [i / 997 for i in range(997)]


def drawn(logits, seen=(), written={}, **settings):
    counts = torch.zeros(2, len(logits), dtype=torch.int64)
    counts[0, list(seen)] = 1
    for token, count in written.items():
        counts[1, token] = count
    rows, n = logits.expand(len(UNIFORMS), -1), len(UNIFORMS)
    return set(sample(rows, UNIFORMS, Sampling(**PLAIN | settings), counts.expand(n, -1, -1)))


def test_sampling_inverts_the_cumulative_distribution():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    uniforms = [0, 0.0999, 0.1001, 0.2999, 0.3001, 0.6001, 1 - 2**-53]
    assert sample(logits.expand(7, -1), uniforms, Sampling(**PLAIN)) == [0, 0, 1, 1, 2, 3, 3]
    impossible = torch.tensor([-math.inf, 0.0, -math.inf])
    assert sample(impossible.expand(3, -1), [0.0, 0.5, 1 - 2**-53], Sampling(**PLAIN)) == [1, 1, 1]


TENTHS = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))  # entropy 1.28, surprises 2.3, 0.9, 1.2, 1.6
KEPT = {  # by a filter's number: the tokens, the likeliest first but for typical_p
    "top_k": {1: "1", 2: "12", 3: "123", 4: "1230", 99: "1230"},
    "top_p": {0.01: "1", 0.39: "1", 0.41: "12", 0.69: "12", 0.71: "123", 1: "1230"},  # that add up to it
    "min_p": {0: "1230", 0.24: "1230", 0.26: "123", 0.6: "12", 1: "1"},  # a share of the likeliest
    "typical_p": {0.01: "2", 0.29: "2", 0.31: "23", 0.51: "231", 0.91: "2310"},  # of typical surprise
}


@pytest.mark.parametrize("name", KEPT)
def test_a_filter_keeps_its_tokens_and_ties(name):
    for number, kept in KEPT[name].items():
        assert drawn(TENTHS, **{name: number}) == {*map(int, kept)}, number
    assert drawn(torch.zeros(3), **{name: 1 if name == "top_k" else 0.3}) == {0, 1, 2}


def test_filters_come_one_after_the_other():
    assert drawn(TENTHS, top_p=0.5, top_k=2) == {1}  # after top-k its probability is 0.4 / 0.7
    hot = torch.tensor([0.0, 1.0])
    assert drawn(hot, min_p=0.5) == {1} and drawn(hot, min_p=0.5, temperature=2.0) == {0, 1}
    likely = torch.log(torch.tensor([0.6, 0.2, 0.15, 0.05]))  # the likeliest may be left out
    assert drawn(likely, typical_p=0.01) == {1} == drawn(likely, typical_p=0.01, min_p=1, top_p=0.5)
    assert drawn(likely, typical_p=0.9, top_k=1) == {0}
    impossible = torch.tensor([-math.inf, 0.0, 0.5, -1000.0])
    assert drawn(impossible, typical_p=0.99) == {1, 2}


def test_the_repetition_penalty_makes_what_has_occurred_less_likely():
    logits = torch.tensor([2.0, 1.5, -1.0, -1.5])
    greedy = dict(temperature=0)
    assert drawn(logits, **greedy, repetition_penalty=2.0) == {0}
    assert drawn(logits, {0}, **greedy, repetition_penalty=2.0) == {1}
    assert drawn(logits, {0, 1}, **greedy, repetition_penalty=100.0) == {0}  # 0.02 is still the largest
    assert drawn(-logits, {3}, **greedy, repetition_penalty=2.0) == {2}
    assert drawn(torch.tensor([-1.0, -1.5]), {0}, **greedy, repetition_penalty=2.0) == {1}
    assert drawn(logits, {0}, **greedy, repetition_penalty=0.5) == {0}


def test_the_frequency_penalty_counts_and_the_presence_penalty_does_not():
    logits, greedy = torch.tensor([3.0, 2.0, 1.0, 0.0]), dict(temperature=0)
    assert drawn(logits, written={0: 3}, **greedy) == {0}
    assert drawn(logits, written={0: 3}, **greedy, frequency_penalty=0.3) == {0}
    assert drawn(logits, written={0: 3}, **greedy, frequency_penalty=0.4) == {1}
    assert drawn(logits, written={0: 30}, **greedy, presence_penalty=0.9) == {0}
    assert drawn(logits, written={0: 1}, **greedy, presence_penalty=1.1) == {1}
    assert drawn(logits, written={0: 1}, **greedy, presence_penalty=0.6, frequency_penalty=0.5) == {1}
    assert drawn(logits, written={3: 2}, **greedy, frequency_penalty=-1.6) == {3}
    assert drawn(logits, {0}, **greedy, frequency_penalty=2.0, presence_penalty=2.0) == {0}  # of the prompt


def test_the_bias_is_added_to_the_logits():
    logits = torch.tensor([3.0, 2.0, 1.0, -math.inf])
    assert drawn(logits, temperature=0, logit_bias=((2, 2.1),)) == {2}
    assert drawn(logits, min_p=1e-9, logit_bias=((0, -100), (1, -100.0))) == {2}
    assert drawn(logits, logit_bias=((3, 100),), temperature=0) == {0}
    assert drawn(logits, temperature=0.1, top_k=1, logit_bias=((1, 1.0),)) == {0, 1}  # before the filters


def test_logits_with_nan_or_infinity_are_refused():
    for bad, temperature in itertools.product([[0.0, math.nan], [0.0, math.inf], 2 * [-math.inf]], (0, 1.0)):
        with naming(bad, temperature):
            first, second = sample(torch.tensor([[0.0, 1.0], bad]), [0.5, 0.5], Sampling(temperature))
            assert first >= 0 and second == -1


def test_settings_are_kept_as_numbers_of_python():
    for real, whole in ((np.float64, np.int64), (np.array, np.array), (torch.tensor, torch.tensor)):
        kept = Sampling(real(0.5), whole(3), whole(1), logit_bias=((whole(1), real(2.5)),))
        assert repr(kept) == repr(Sampling(0.5, 3, 1, logit_bias=((1, 2.5),)))
    assert Sampling(None, top_p=None, logit_bias=None) == Sampling() != Sampling(top_k=None)
    assert Sampling(top_k=0) == Sampling(top_k=-1) == Sampling(top_k=None)


def test_wrong_settings_are_named():
    for change, error, message in (
        (dict(temperature=math.nan), ValueError, "temperature is nan"),
        (dict(temperature="1"), TypeError, "temperature is a str"),
        (dict(temperature=np.array([0.5])), TypeError, r"temperature is an ndarray of shape \(1,\); it"),
        (dict(top_k=np.float64(3)), TypeError, "top_k is a float64; it must be a whole number or None"),
        (dict(top_k=-2), ValueError, "top_k is -2"),
        (dict(top_p=0), ValueError, "top_p is 0"),
        (dict(presence_penalty=2.1), ValueError, "presence_penalty is 2.1; it must be from -2 to 2"),
        (dict(logit_bias={1: 2}), TypeError, "logit_bias must be a tuple of pairs"),
        (dict(logit_bias=(("1", 2),)), TypeError, "a token of logit_bias is a str; it must be a whole"),
        (dict(logit_bias=((-1, 1),)), ValueError, "logit_bias has token -1; it must be at least 0"),
        (dict(logit_bias=((1, 101),)), ValueError, "logit_bias has 101 for token 1; it must be from -100"),
        (dict(logit_bias=((1, 1), (1, 2))), ValueError, "logit_bias has a token twice"),
    ):
        with naming(change), pytest.raises(error, match=message):
            Sampling(**change)


def test_the_uniform_numbers_are_pytorchs():
    for seed in (0, 1337, 2**32, 2**63, 2**64 - 1):
        expected = torch.rand(600, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        numbers, others = Uniforms(seed), Uniforms(7)
        assert [*numbers(1), *others(5)[:0], *numbers(256), *numbers(343)] == expected.tolist()
