"""A run by time ends on time, whatever the steps take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from training import schedule
from training.recipe import DECAYS, OWN_TEXT, learning_rate
from training.schedule import BySteps, ByTime


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


@pytest.mark.parametrize(
    "step_seconds",
    [lambda at: 0.1, lambda at: 0.05 if at < 0.5 else 0.4, lambda at: 0.4 if at < 0.5 else 0.01],
    ids=["steady", "slower from the middle on", "faster from the middle on"],
)
def test_a_run_ends_on_time_with_a_rate_near_zero(clock, step_seconds):
    by_time = ByTime(MINUTE)
    by_time.finishing = 2.0
    rates = drive(clock, by_time, step_seconds)
    assert clock.now - 1000 == pytest.approx(58, abs=0.5)
    assert max(rates) > 0.9 and rates[-1] < 1e-3
    peak = rates.index(max(rates))
    assert all(a >= b for a, b in zip(rates[peak:], rates[peak + 1 :]))
    assert all(a <= b for a, b in zip(rates[:peak], rates[1 : peak + 1]))


def test_a_step_during_which_the_machine_slept_counts_as_ten(clock):
    by_time = ByTime(MINUTE)
    naps = iter([5000.0])
    drive(clock, by_time, lambda at: next(naps, 0.1) if at > 0.5 else 0.1)
    assert clock.now - 1000 == pytest.approx(5000 + 59, abs=0.3)
    assert by_time.seconds == pytest.approx(60, abs=0.1)
    assert by_time.progress() == pytest.approx(1, abs=0.01)


def test_time_between_steps_counts(clock):
    by_time = ByTime(MINUTE)
    by_time.begin(clock.now)
    for _ in range(3):
        clock.now += 7.0  # an evaluation
        by_time.stepped(0.0)
    assert by_time.seconds == pytest.approx(21.0) and by_time.left() == pytest.approx(39.0)


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
    assert 1.0 <= spent <= 60 * schedule.EVALUATING


def test_the_budget_is_never_spent_without_a_step(clock):
    by_time = ByTime(dataclasses.replace(OWN_TEXT, minutes=1e-6))
    clock.now += 5
    assert len(drive(clock, by_time, lambda at: 1.0)) == 1


def test_a_schedule_goes_on_where_it_was(clock):
    first = ByTime(MINUTE)
    first.finishing = 1.0
    first.begin(clock.now)
    for _ in range(200):
        clock.now += 0.1
        first.stepped(0.1)
    second = ByTime(MINUTE)
    second.load(first.state())
    assert (second.done, second.rate(), second.progress()) == (200, first.rate(), first.progress())
    clock.now += 10_000
    rates = drive(clock, second, lambda at: 0.1)
    assert second.seconds == pytest.approx(59, abs=0.2) and len(rates) == pytest.approx(390, abs=3)


@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_goes_from_the_peak_to_zero(decay):
    rates = [DECAYS[decay](i / 100) for i in range(101)]
    assert rates[0] == 1.0 and rates[-1] == pytest.approx(0)
    assert all(a >= b for a, b in zip(rates, rates[1:]))
    recipe = dataclasses.replace(OWN_TEXT, steps=500, minutes=None, decay=decay)
    assert learning_rate(recipe, 49) == 1.0 and learning_rate(recipe, 500) == pytest.approx(0)


def test_by_steps_evaluates_after_every_so_many_and_the_last(clock):
    by_steps = BySteps(dataclasses.replace(OWN_TEXT, steps=25, eval_every=10, minutes=None))
    by_steps.begin(clock.now)
    due = []
    while not by_steps.ended():
        clock.now += 1
        by_steps.stepped(1.0)
        due += [by_steps.done] if by_steps.evaluation_due() else []
    assert due == [10, 20, 25] and by_steps.seconds == 25


def test_the_average_reaches_back_over_a_share_of_the_steps():
    decays = [OWN_TEXT.average_decay(done) for done in (0, 10, 100, 1000, 10**6)]
    assert decays[:2] == [0, 0] and decays == sorted(decays)
    assert decays[3] == pytest.approx(1 - 1 / (OWN_TEXT.window * 1000)) and decays[4] == OWN_TEXT.average


@pytest.mark.parametrize("steps", [1, 9, 30, 50, 51, 500])
def test_a_short_run_warms_up_for_a_tenth_of_its_steps(steps):
    recipe = dataclasses.replace(OWN_TEXT, minutes=None, steps=steps)
    rates = [learning_rate(recipe, step) for step in range(steps)]
    assert max(rates) == 1 == rates[max(1, steps // 10) - 1]
    assert steps < 30 or rates[-1] < 0.05


def test_a_stalled_evaluation_does_not_end_all_later_ones(clock):
    by_time = ByTime(dataclasses.replace(OWN_TEXT, minutes=3.0))
    by_time.begin(clock.now)
    for seconds in (0.1, 30.0):
        clock.now += seconds
        by_time.evaluated(seconds)
    assert by_time._next_evaluation < 90  # half of the run
