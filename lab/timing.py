"""Timing of a call on a machine that others use too.

Other programs slow a core, the shared cache and memory for milliseconds at a time, and no system counter
shows it. So a round is bursts of calls, with a sample of the machine's speed before and after each. Its time
is that of the median call between fast samples. Only the samples decide which bursts count; see calm().
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from shakespeare.lab import machine

CONFIDENCE = 0.95  # least confidence of a median's interval
WARM_UP_SAMPLES = 20  # of the machine's speed, which show its fastest
PATIENCE = 0.01  # seconds; longest wait for a quiet machine before a sample
FEWEST_QUIET = 3  # samples that count even if disturbed

T = TypeVar("T")


class Round(NamedTuple):
    """The result of time_round(). seconds: time of the median call in calm() bursts. every: in all bursts.

    pace: of the calmest burst. spent: seconds of all calls. pages: memory pages that they were given.
    """

    seconds: float
    every: float
    pace: float
    spent: float
    pages: int


def time_round(call: Callable[[], object], bursts: Sequence[int], pace: Callable[[bool], float]) -> Round:
    """Time bursts of calls.

    pace(wait) returns the machine's speed, at most 1; wait: it may wait until the machine is fast again. A
    burst's pace is the slower one of the samples before and after it.
    """
    times, paces, pages, before = [], [], 0, 0.0
    for repeats in bursts:
        if before < machine.SLOWED_BELOW:
            before = pace(True)
        faults, ticks = machine.page_faults(), [time.perf_counter()]
        for _ in range(repeats):
            call()
            ticks.append(time.perf_counter())
        pages += machine.page_faults() - faults
        after = pace(False)
        times.append([end - start for start, end in itertools.pairwise(ticks)])
        paces.append(min(before, after))
        before = after
    quiet, every = (statistics.median(itertools.chain(*kept)) for kept in (calm(times, paces, 1), times))
    return Round(quiet, every, max(paces), sum(map(sum, times)), pages)


def calm(timed: list[T], paces: Sequence[float], least: int) -> list[T]:
    """The items that were timed undisturbed, and the next calmest ones if there are fewer than `least`."""
    enough = min([machine.SLOWED_BELOW, *sorted(paces, reverse=True)[:least]])
    return [item for item, pace in zip(timed, paces) if pace >= enough]


class Samples(NamedTuple):
    """Times that were measured one by one; paces: the lower speed of the machine before and after each."""

    seconds: list[float]
    paces: list[float]

    @property
    def counted(self) -> list[float]:
        """Seconds of the quiet samples, but of at least FEWEST_QUIET."""
        return calm(self.seconds, self.paces, FEWEST_QUIET)

    @property
    def median(self) -> float:
        """The median seconds of those that count."""
        return statistics.median(self.counted)

    @property
    def disturbance(self) -> float:
        """The median of all samples, as a multiple of that of those that count."""
        return statistics.median(self.seconds) / self.median

    @property
    def spread(self) -> float:
        """The interquartile range of those that count, as a share of the median."""
        low, high = quartiles(self.counted)
        return (high - low) / self.median

    @property
    def quiet(self) -> str:
        """How many samples were quiet, as '5 of 9'."""
        return quiet_of(self.paces)


def quiet_of(paces: Sequence[float]) -> str:
    """How many of them are those of quiet samples, as '5 of 9'."""
    return f"{sum(pace >= machine.SLOWED_BELOW for pace in paces)} of {len(paces)}"


def take_turns(
    calls: Sequence[Callable[[], float]], rounds: int, load: machine.Load | None = None, size: int = 0
) -> list[Samples]:
    """The seconds of each call in each round, in turns. load: samples the speed, reading `size` bytes too."""
    load, samples = load or machine.Load(), [Samples([], []) for _ in calls]
    for _ in range(WARM_UP_SAMPLES):
        load.sample(size)
    for _ in range(rounds):
        for call, of_call in zip(calls, samples):
            before = load.sample(size, PATIENCE)
            of_call.seconds.append(call())
            of_call.paces.append(min(before, load.sample(size)))
    return samples


def seconds_of(call: Callable[[], object], repeats: int = 1) -> float:
    """The mean seconds of `repeats` calls."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def repeated(call: Callable[[], object], least: float = 0.0) -> Callable[[], float]:
    """A function that returns the mean seconds of a call, repeated for about `least` seconds, warmed up."""
    return partial(seconds_of, call, max(1, round(least / seconds_of(call))))


def in_turns(calls: Sequence[Callable[[], object]], rounds: int, least: float = 0.0) -> list[Samples]:
    """The seconds of each repeated() call in each round; the calls take turns."""
    return take_turns([repeated(call, least) for call in calls], rounds)


def spread(count: int, parts: int) -> list[int]:
    """The sizes of at most `parts` nearly equal parts of `count`, larger ones first, none of them 0."""
    parts = min(parts, count)
    return [count // parts + (i < count % parts) for i in range(parts)]


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile of at least one number."""
    low, high = np.percentile(seconds, (25, 75))
    return float(low), float(high)


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """The CONFIDENCE interval of the median of the distribution that the numbers are drawn from.

    Its bounds are the k-th number from below and from above. A number is as likely below the median as above
    it, so the median is out of bounds with probability 2 P(Binomial(n, 1/2) < k) for any distribution. k is
    the largest with this confidence. Of fewer than six numbers they are the least and the greatest.
    """
    n = len(seconds)
    below = itertools.accumulate(math.comb(n, i) for i in range(n // 2))
    k = sum(1 for _ in itertools.takewhile(lambda ways: 2 * ways / 2**n <= 1 - CONFIDENCE, below)) or 1
    ordered = sorted(seconds)
    return ordered[k - 1], ordered[-k]
