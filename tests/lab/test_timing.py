"""Timing: what a round is, which rounds count, and the interval of a median."""

import itertools
import math

import pytest
import torch

from shakespeare.lab import machine, timing

# of the fastest rate, before and after each of six calls
SLOWED = [1.0, 0.96, 0.98, 0.9, 1.0, 1.0, 0.97, 0.99, 0.5, 1.0, 1.0, 1.0]


class Planned(timing.Clock):
    """A clock with planned speeds; a call takes some seconds, and a sample of the speed 1000."""

    burst = 2.0

    def __init__(self, monkeypatch, speeds, pages=()):
        self.now, self.speeds, self.waits, self.news = 0.0, iter(speeds), [], iter(pages)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def calls(self, *seconds):
        left = iter(seconds)

        def call():
            self.now += next(left)

        return call

    def speed(self, wait=False):
        self.waits.append(wait)
        self.now += 1000  # it must not count as a call's time
        return next(self.speeds)

    def pages(self):
        return next(self.news, 0)


def test_a_round_is_what_its_fast_bursts_took(monkeypatch):
    """Three bursts of two calls. The second was slowed, so a fast speed is awaited after it."""
    clock = Planned(monkeypatch, [1.0, 1.0, 0.5, 0.97, 0.96, 0.4, 0.6, 0.6, 0.5])
    timer = timing.Timer(clock.calls(1.0, 2.0, 100.0, 100.0, 3.0, 4.0), clock, 6.0, once=1.0)
    timer.round()
    assert timer.samples == timing.Samples(seconds=[2.5], every=[3.5], paces=[1.0])
    assert clock.waits == [True, False, False, True, False]
    timer = timing.Timer(clock.calls(1.0, 2.0), clock, 4.0, once=2.0)
    timer.round()
    assert timer.samples == timing.Samples(seconds=[2.0], every=[1.5], paces=[0.5])


def test_a_round_with_new_pages_is_measured_again(monkeypatch):
    """New pages are 2 % of a call's second. After four such tries further rounds have one."""
    clock = Planned(monkeypatch, itertools.repeat(1.0), [0, 20_000, 20_000, 20_000])
    timer = timing.Timer(clock.calls(1.0, 1.1), clock, once=1.0)
    timer.round()
    assert timer.samples.seconds == pytest.approx([1.1])
    clock = Planned(monkeypatch, itertools.repeat(1.0), itertools.count(0, 20_000))
    timer = timing.Timer(clock.calls(1.0, 1.1, 1.2, 1.3, 1.4), clock, once=1.0)
    timer.round()
    timer.round()
    assert timer.samples.seconds == pytest.approx([1.3, 1.4])


def test_disturbed_samples_are_told_apart(monkeypatch):
    """The core is slowed while calls 2 and 5 of six begin or end; these took longer, and so did call 3."""
    rates = itertools.chain([1.0] * 20, SLOWED)
    monkeypatch.setattr(machine, "processor_times", lambda: None)
    monkeypatch.setattr(machine, "nop_rate", lambda: next(rates))
    monkeypatch.setattr(machine, "page_faults", lambda: 0)
    monkeypatch.setattr(timing, "PATIENCE", 0.0)
    clock = Planned(monkeypatch, [])
    timer = timing.Timer(clock.calls(1.0, 5.0, 3.0, 1.2, 9.0, 1.1), timing.Cpu(), once=1.0)
    assert list(timing.rounds([timer], 6)) == [timer] * 6
    samples = timer.samples
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
