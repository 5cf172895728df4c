"""Timing: what a round is, which rounds count, and the interval of a median."""

import itertools
import math

import pytest
import torch

from shakespeare.lab import machine, timing

# of the fastest rate, before and after each of six calls
SLOWED = [1.0, 0.96, 0.98, 0.9, 1.0, 1.0, 0.97, 0.99, 0.5, 1.0, 1.0, 1.0]


def test_a_round_is_what_its_fast_bursts_took(monkeypatch):
    """Three bursts of two calls. The second was slowed, so a fast pace is awaited after it."""
    paces = iter([1.0, 1.0, 0.5, 0.97, 0.96])
    waits, now = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    takes = iter([1.0, 2.0, 100.0, 100.0, 3.0, 4.0])

    def pace(wait):
        waits.append(wait)
        now[0] += 1000  # it must not count as a call's time
        return next(paces)

    def call():
        now[0] += next(takes)

    timed = timing.time_round(call, [2, 2, 2], pace)
    assert timed == (2.5, 3.5, 1.0, 210.0, timed.pages)
    assert waits == [True, False, False, True, False]
    paces, takes = iter([0.4, 0.6, 0.6, 0.5]), iter([1.0, 2.0])
    timed = timing.time_round(call, [1, 1], lambda wait: next(paces))
    assert timed[:4] == (2.0, 1.5, 0.5, 3.0)


def test_disturbed_samples_are_told_apart(monkeypatch):
    """The core is slowed while calls 2 and 5 of six begin or end; these took longer, and so did call 3."""
    now, left, rates = [0.0], iter([1.0, 5.0, 3.0, 1.2, 9.0, 1.1]), itertools.chain([1.0] * 20, SLOWED)
    monkeypatch.setattr(machine, "processor_times", lambda: None)
    monkeypatch.setattr(machine, "nop_rate", lambda: next(rates))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "PATIENCE", 0.0)

    def call():
        before = now[0]
        now[0] += next(left)
        return now[0] - before

    (samples,) = timing.take_turns([call], 6)
    assert samples.seconds == pytest.approx([1.0, 5.0, 3.0, 1.2, 9.0, 1.1])
    assert samples.quiet == "4 of 6" and samples.counted == pytest.approx([1.0, 3.0, 1.2, 1.1])
    assert samples.median == pytest.approx(1.15)
    assert samples.disturbance == pytest.approx(2.1 / 1.15)


def test_the_interval_of_a_median():
    """Of 10 the 2nd and 9th: the 3rd and 8th cover the median with less than 95 %."""
    for rounds, k in ((1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (10, 2), (15, 4), (100, 40)):
        seconds = torch.randperm(rounds, generator=torch.Generator().manual_seed(0)).tolist()
        assert timing.interval(seconds) == (k - 1, rounds - k)
        outside = [sum(math.comb(rounds, i) for i in range(each)) / 2**rounds for each in (k, k + 1)]
        assert 1 - 2 * outside[1] < 0.95 and (1 - 2 * outside[0] >= 0.95 or rounds < 6), rounds
