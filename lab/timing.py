"""How a call is timed on a machine that others use too.

They slow the cache and memory that they share with us for milliseconds at a time, which no system tells. So a
round is made of short bursts of calls, with a sample of the bandwidth before and after each, and its time is
that of the middle call between fast samples. What counts is chosen by the samples alone, never by the calls'
own times; see calm().
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from lab import machine

SURE = 0.95  # how sure a median's interval is, at least

T = TypeVar("T")


class Round(NamedTuple):
    """What clock() gives.

    seconds: of the middle call in calm() bursts; pace: of the calmest. spent: seconds of all calls. pages: of
    memory that were handed out for them.
    """

    seconds: float
    pace: float
    spent: float
    pages: int


def clock(call: Callable[[], object], bursts: Sequence[int], pace: Callable[[bool], float]) -> Round:
    """Time bursts of so many calls.

    pace(wait) tells how fast the machine is, 1 at best; wait: it may do so when the machine is fast again. A
    burst's pace is the slower one of those before and after it.
    """
    times, paces, pages, before = [], [], 0, 0.0
    for repeats in bursts:
        if before < machine.SLOWED:
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
    middle = statistics.median(itertools.chain(*calm(times, paces, 1)))
    return Round(middle, max(paces), sum(map(sum, times)), pages)


def calm(timed: list[T], paces: Sequence[float], least: int) -> list[T]:
    """Those of what was timed that nobody slowed; lest they be fewer than `least`, the next calmest too."""
    enough = min([machine.SLOWED, *sorted(paces, reverse=True)[:least]])
    return [each for each, pace in zip(timed, paces) if pace >= enough]


def spread(count: int, parts: int) -> list[int]:
    """How many of them each part has, as evenly as they divide, the first ones more; never none."""
    parts = min(parts, count)
    return [count // parts + (i < count % parts) for i in range(parts)]


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The first and the third one, of one number or more."""
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median of what the numbers are drawn from, of which one can be SURE, in their unit.

    They are the k-th number from below and from above. A number is as likely below that median as above it,
    so it is out of bounds with the chance 2 P(Binomial(n, 1/2) < k), whatever the distribution; k is the
    largest that is sure enough. Of fewer than six numbers they are the least and the greatest, and less sure.
    """
    n = len(seconds)
    chances = (
        math.exp(math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2))
        for i in range(n // 2)
    )
    k = sum(2 * below <= 1 - SURE for below in itertools.accumulate(chances)) or 1
    ordered = sorted(seconds)
    return ordered[k - 1], ordered[-k]
