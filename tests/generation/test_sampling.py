"""Sampling: the filters, then one uniform number that decides the token."""

import itertools
import math

import numpy as np
import pytest
import torch
from support import naming

from shakespeare.generation.request import Uniforms
from shakespeare.generation.sampling import Sampling, sample

PLAIN = dict(temperature=1.0, top_k=None)
UNIFORMS = [i / 997 for i in range(997)]


def drawn(logits, seen=(), written={}, **settings):
    """All tokens that can be drawn."""
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


def test_top_k_keeps_the_k_likeliest_and_ties():
    logits = torch.tensor([1.0, 4.0, 3.0, 3.0, 0.0])
    for k, kept in [(1, {1}), (2, {1, 2, 3}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})]:
        assert drawn(logits, top_k=k) == kept


def test_top_p_keeps_the_likeliest_that_add_up_to_it():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    cases = [(0.01, {1}), (0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {1, 2, 3}), (1, {0, 1, 2, 3})]
    for p, kept in cases:
        assert drawn(logits, top_p=p) == kept
    assert drawn(logits, top_p=0.5, top_k=2) == {1}  # after top-k its probability is 0.4 / 0.7
    assert drawn(torch.zeros(3), top_p=0.3) == {0, 1, 2}  # ties are kept


def test_min_p_keeps_a_share_of_the_likeliest():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))
    for p, kept in [(0, {0, 1, 2, 3}), (0.24, {0, 1, 2, 3}), (0.26, {1, 2, 3}), (0.6, {1, 2}), (1, {1})]:
        assert drawn(logits, min_p=p) == kept
    hot = torch.tensor([0.0, 1.0])
    assert drawn(hot, min_p=0.5) == {1} and drawn(hot, min_p=0.5, temperature=2.0) == {0, 1}


def test_typical_p_keeps_the_tokens_of_typical_surprise():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.2]))  # entropy 1.28, surprises 2.3, 0.9, 1.2, 1.6
    for p, kept in [(0.01, {2}), (0.29, {2}), (0.31, {2, 3}), (0.51, {1, 2, 3}), (0.91, {0, 1, 2, 3})]:
        assert drawn(logits, typical_p=p) == kept
    assert drawn(torch.zeros(3), typical_p=0.3) == {0, 1, 2}  # ties are kept
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
        with naming(bad, temperature), pytest.raises(ValueError, match="NaN, or the largest is infinite"):
            sample(torch.tensor([[0.0, 1.0], bad]), [0.5, 0.5], Sampling(temperature))


def test_settings_are_kept_as_numbers_of_python():
    for real, whole in ((np.float64, np.int64), (np.array, np.array), (torch.tensor, torch.tensor)):
        kept = Sampling(real(0.5), whole(3), whole(1), logit_bias=((whole(1), real(2.5)),))
        assert repr(kept) == repr(Sampling(0.5, 3, 1, logit_bias=((1, 2.5),)))
    assert Sampling(None, top_p=None, logit_bias=None) == Sampling() != Sampling(top_k=None)


def test_wrong_settings_are_named():
    for change, error, message in (
        (dict(temperature=math.nan), ValueError, "temperature is nan"),
        (dict(temperature="1"), TypeError, "temperature is a str"),
        (dict(temperature=np.array([0.5])), TypeError, r"temperature is a ndarray of shape \(1,\); it"),
        (dict(top_p=np.float32("nan")), ValueError, "top_p is nan"),
        (dict(top_k=np.float64(3)), TypeError, "top_k is a float64; it must be a whole number or None"),
        (dict(top_k=np.True_), TypeError, "top_k is a bool; it must be a whole number or None"),
        (dict(top_k=0), ValueError, "top_k is 0"),
        (dict(top_p=0), ValueError, "top_p is 0"),
        (dict(repetition_penalty=0), ValueError, "repetition_penalty is 0"),
        (dict(presence_penalty=2.1), ValueError, "presence_penalty is 2.1; it must be from -2 to 2"),
        (dict(frequency_penalty=math.nan), ValueError, "frequency_penalty is nan"),
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
