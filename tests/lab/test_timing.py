"""Timing: what a round is, which rounds count, and the interval of a median."""

from __future__ import annotations

import math

import pytest
import torch

from lab import timing


def test_rounds_that_were_not_slowed_count():
    """Rounds whose pace is at least the limit; if fewer than `least`, the rounds with the highest paces."""
    assert timing.calm("abcd", [1.0, 0.949, 0.95, 0.2], 1) == ["a", "c"]
    assert timing.calm("abcd", [0.5, 0.949, 0.3, 0.2], 1) == ["b"]
    assert timing.calm("abcd", [0.5, 0.96, 0.3, 0.2], 3) == ["a", "b", "c"]
    assert timing.calm("abcd", [0.5, 0.96, 0.3, 0.2], 6) == ["a", "b", "c", "d"]
    assert timing.calm([], [], 6) == []


def test_a_round_is_what_its_fast_bursts_took():
    """Three bursts of two calls. The second was slowed, so a fast pace is awaited after it."""
    paces = iter([1.0, 1.0, 0.5, 0.97, 0.96])
    waits, now = [], [0.0]
    takes = iter([1.0, 2.0, 100.0, 100.0, 3.0, 4.0])

    def pace(wait):
        waits.append(wait)
        now[0] += 1000  # it must not count as a call's time
        return next(paces)

    def call():
        now[0] += next(takes)

    timed = timing.time_round(call, [2, 2, 2], pace, clock=lambda: now[0])
    assert timed == (2.5, 1.0, 210.0, timed.pages)
    assert waits == [True, False, False, True, False]
    paces, takes = iter([0.4, 0.6, 0.6, 0.5]), iter([1.0, 2.0])
    assert timing.time_round(call, [1, 1], lambda wait: next(paces), clock=lambda: now[0])[:3] == (
        2.0,
        0.5,
        3.0,
    )


@pytest.mark.parametrize(
    "rounds, passes", [(2, [1, 1]), (5, [1] * 5), (7, [2, 2, 1, 1, 1]), (10, [2] * 5), (13, [3, 3, 3, 2, 2])]
)
def test_rounds_are_divided_among_the_passes(rounds, passes):
    assert timing.spread(rounds, 5) == passes


@pytest.mark.parametrize(
    "rounds, k", [(1, 1), (2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (100, 40)]
)
def test_the_interval_of_a_median(rounds, k):
    """Of 10 the 2nd and 9th: they cover the median with 97.9 %, the 3rd and 8th with less than 95 %."""
    seconds = torch.randperm(rounds, generator=torch.Generator().manual_seed(0)).tolist()
    assert timing.interval(seconds) == (k - 1, rounds - k)

    def coverage(k):
        return 1 - 2 * sum(math.comb(rounds, i) for i in range(k)) / 2**rounds

    assert coverage(k + 1) < 0.95 and (coverage(k) >= 0.95 or rounds < 6)
    assert rounds != 10 or coverage(k) == pytest.approx(0.979, abs=5e-4)


def test_an_interval_covers_the_median_as_often_as_it_says():
    drawn = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0)).exp().tolist()
    hits = sum(low <= 1 <= high for low, high in map(timing.interval, drawn))
    assert hits / 2000 == pytest.approx(0.979, abs=0.01)
