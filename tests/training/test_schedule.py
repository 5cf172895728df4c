"""A run by time ends on time, whatever the steps take."""

import dataclasses
from collections.abc import Callable

import pytest
from support import naming

from shakespeare.training import schedule
from shakespeare.training.recipe import EVALUATING, OWN_TEXT
from shakespeare.training.schedule import ByTime


class Clock:
    """In place of time.monotonic()."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(schedule, "time", fake)
    return fake


def drive(clock: Clock, by_time: ByTime, step_seconds: Callable[[float], float]) -> list[float]:
    """Run the schedule; step_seconds: of a step at a progress. Returns the rates of all steps."""
    rates = []
    by_time.begin(clock.now)
    while not by_time.ended():
        rates.append(by_time.rate())
        seconds = step_seconds(by_time.progress())
        clock.now += seconds
        by_time.stepped(seconds)
    return rates


MINUTE = dataclasses.replace(OWN_TEXT, minutes=1.0, decay="cosine")  # whose end is the flattest


def test_a_run_ends_on_time_with_a_rate_near_zero(clock):
    for before, after in ((0.1, 0.1), (0.05, 0.4), (0.4, 0.01)):  # seconds of a step, by half of the run
        by_time, start = ByTime(MINUTE), clock.now
        by_time.finishing = 2.0
        rates = drive(clock, by_time, lambda at, steps=(before, after): steps[at >= 0.5])
        with naming(before, after):
            assert clock.now - start == pytest.approx(58, abs=0.5)
            assert max(rates) > 0.9 and rates[-1] < 1e-3
            peak = rates.index(max(rates))
            assert rates[:peak] == sorted(rates[:peak])
            assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_evaluations_take_a_small_share_of_the_time(clock):
    by_time = ByTime(MINUTE)
    by_time.begin(clock.now)
    spent = 0.0
    while not by_time.ended():
        clock.now += 0.1
        by_time.stepped(0.1)
        if by_time.evaluation_due():
            clock.now += 0.5
            spent += 0.5
            by_time.evaluated(0.5)
    assert 1.0 <= spent <= 60 * EVALUATING


def test_a_schedule_goes_on_where_it_was(clock):
    first = ByTime(MINUTE)
    first.finishing = 1.0
    first.begin(clock.now)
    for _ in range(200):
        clock.now += 0.1
        first.stepped(0.1)
    second = ByTime(MINUTE)
    second.load(first.state(), [])
    assert (second.done, second.rate(), second.progress()) == (200, first.rate(), first.progress())
    clock.now += 10_000
    rates = drive(clock, second, lambda at: 0.1)
    assert second.seconds == pytest.approx(59, abs=0.2) and len(rates) == pytest.approx(390, abs=3)
