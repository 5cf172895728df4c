"""The clock of all measurements: contenders take turns in rounds, and disturbed samples are discarded.

Other programs slow a core, the shared cache and memory for milliseconds at a time, and no system counter
shows it. So a round is bursts of calls, with a sample of the machine's speed before and after each. Its time
is that of the median call between fast samples. Only the samples decide which bursts count; see calm().
A round in which the system gave new pages is measured again: clearing them takes long.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from shakespeare.attention_ext.layout import shares
from shakespeare.lab import machine

CONFIDENCE = 0.95  # least confidence of a median's interval
FIRM_MARGIN = 0.025  # largest margin of a firm median; two firm medians can differ by twice as much
WARM_UP_SAMPLES = 20  # first samples of the speed, which show the fastest
PATIENCE = 0.01  # seconds; longest wait for a quiet machine before a burst
WAIT_SHARE = 0.1  # share of the time that all these waits may take
BURST_SECONDS = 0.005  # time between two samples of the speed; disturbances take some 10 ms
PAGE_FAULT_SECONDS = 1e-6  # about
MAX_FAULT_SHARE = 0.01  # share of a round's time; with more, the round is measured again
MAX_TRIES = 4  # tries of such a round; further rounds of a contender that needs all of them have one

T = TypeVar("T")


class Clock:
    """Times calls by the host's clock, on a device that nothing disturbs.

    A device that is timed otherwise derives from it. burst: seconds of calls between samples of the speed.
    short: seconds; before shorter calls, an untimed one clears the caches of the last contender's data.
    """

    burst = math.inf
    short = 0.02

    def time(self, call: Callable[[], Any], count: int, cold: bool = False) -> list[float]:
        """Seconds of each of `count` calls. cold: a GPU's L2 cache is cleared before each."""
        ticks = [time.perf_counter()]
        for _ in range(count):
            call()
            ticks.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(ticks)]

    def speed(self, wait: bool = False) -> float:
        """The machine's speed, at most 1. wait: it may wait until the machine is fast again."""
        return 1.0

    def pages(self) -> int:
        """The number of memory pages that the system has given to the process that makes the calls."""
        return 0


class Cpu(Clock):
    """Times calls on this machine, which other programs use too.

    buffer: bytes that a sample of the speed reads, more than private caches hold; 0: none.
    """

    burst = BURST_SECONDS

    def __init__(self, buffer: int = 0) -> None:
        self.load = machine.Load()
        self._buffer = buffer
        self._began = time.perf_counter()
        self._waited = 0.0
        for _ in range(WARM_UP_SAMPLES):
            self.speed()

    def speed(self, wait: bool = False) -> float:
        """The machine's speed, shared cache included, over the fastest so far. wait: for a fast one."""
        start = time.perf_counter()
        patient = wait and self._waited < WAIT_SHARE * (start - self._began)
        speed = self.load.sample(self._buffer, PATIENCE if patient else 0.0)
        if wait:
            self._waited += time.perf_counter() - start
        return speed

    def pages(self) -> int:
        """The number of memory pages that the system has given to this process."""
        return machine.page_faults()


@dataclass(kw_only=True)
class Samples:
    """What a contender's rounds took.

    seconds: the median call's in calm() bursts of a round. every: that in all its bursts. paces: the
    machine's speed in the calmest burst, over the fastest.
    """

    seconds: list[float] = field(default_factory=list)
    every: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    fewest: ClassVar[int] = 3  # rounds that count even if disturbed

    @property
    def counted(self) -> list[float]:
        """Seconds of the quiet rounds, but of at least `fewest`."""
        return calm(self.seconds, self.paces, self.fewest)

    @property
    def median(self) -> Any:
        """The median seconds of a call in those that count; None without any."""
        return statistics.median(self.counted) if self.seconds else None

    @property
    def margin(self) -> float | None:
        """Half the width of the median's interval(), as a share of the median."""
        if not self.seconds:
            return None
        low, high = interval(self.counted)
        return (high - low) / 2 / self.median

    @property
    def disturbance(self) -> float:
        """The median of all calls, as a multiple of that of those that count."""
        return statistics.median(self.every) / self.median

    @property
    def spread(self) -> float:
        """The interquartile range of those that count, as a share of the median."""
        low, high = quartiles(self.counted)
        return (high - low) / self.median

    @property
    def quiet(self) -> str:
        """How many rounds were quiet, as '5 of 9'."""
        return f"{len(calm(self.paces, self.paces, 0))} of {len(self.paces)}"

    @property
    def firm(self) -> bool:
        """Whether the margin is small and enough rounds were quiet."""
        quiet = calm(self.paces, self.paces, 0)
        return (self.margin or 0) <= FIRM_MARGIN and len(quiet) >= min(self.fewest, len(self.paces))

    def cut(self, rounds: int) -> None:
        """Keep only the first rounds."""
        for series in (self.seconds, self.every, self.paces):
            del series[rounds:]


class Timer:
    """A contender: a call that is timed in rounds.

    min_seconds: what the calls of a round take. once: seconds of a call, by default of the second one. cold:
    as in Clock.time().
    """

    def __init__(
        self,
        call: Callable[[], Any],
        clock: Clock,
        min_seconds: float = 0.0,
        *,
        samples: Samples | None = None,
        once: float | None = None,
        cold: bool = False,
    ) -> None:
        self.samples = Samples() if samples is None else samples
        self._call = call
        self._clock = clock
        self._cold = cold
        self._tries = MAX_TRIES
        self._once = clock.time(call, 2)[1] if once is None else once
        repeats = max(1, math.ceil(min_seconds / self._once))
        bursts = max(1, round(repeats * self._once / clock.burst))
        self._bursts = shares(repeats, min(repeats, bursts))

    def round(self) -> None:
        """Add a round to the samples."""
        if self._once < self._clock.short:
            self._clock.time(self._call, 1)
        for _ in range(self._tries):
            times, paces, pages = self._time_bursts()
            if pages * PAGE_FAULT_SECONDS <= MAX_FAULT_SHARE * sum(map(sum, times)):
                break
        else:
            self._tries = 1
        self.samples.seconds.append(statistics.median(itertools.chain(*calm(times, paces, 1))))
        self.samples.every.append(statistics.median(itertools.chain(*times)))
        self.samples.paces.append(max(paces))

    def _time_bursts(self) -> tuple[list[list[float]], list[float], int]:
        """The seconds of each burst's calls, the lower speed before and after each, the new pages of all."""
        times = list[list[float]]()
        paces = list[float]()
        pages = 0
        before = 0.0  # unknown, so it is awaited
        for count in self._bursts:
            if before < machine.SLOWED_BELOW:
                before = self._clock.speed(wait=True)
            faults = self._clock.pages()
            times.append(self._clock.time(self._call, count, self._cold))
            pages += self._clock.pages() - faults
            after = self._clock.speed()
            paces.append(min(before, after))
            before = after
        return times, paces, pages


def rounds(
    timers: Sequence[Timer],
    count: int,
    guard: Callable[[Any], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Timer]:
    """Let contenders take turns, `count` times; yield each after its round.

    guard: stands around a round, with its samples; a contender whose error it catches leaves the rounds. An
    interrupt leaves the same number of rounds to all others.
    """
    running = [(timer, len(timer.samples.paces)) for timer in timers]
    try:
        for _ in range(count):
            for timer, started in list(running):
                samples = timer.samples
                before = len(samples.paces)
                with guard(samples):
                    timer.round()
                if len(samples.paces) <= before:
                    running.remove((timer, started))
                yield timer
    finally:
        fewest = min((len(timer.samples.paces) - started for timer, started in running), default=0)
        for timer, started in running:
            timer.samples.cut(started + fewest)


def in_turns(
    calls: Sequence[Callable[[], Any]], count: int, min_seconds: float = 0.0, clock: Clock | None = None
) -> list[Samples]:
    """The samples of calls that take turns; clock: by default a new Cpu. Otherwise as in Timer, rounds()."""
    clock = clock or Cpu()
    timers = [Timer(call, clock, min_seconds) for call in calls]
    for _ in rounds(timers, count):
        pass
    return [timer.samples for timer in timers]


def calm(timed: list[T], paces: Sequence[float], count: int) -> list[T]:
    """The items that were timed undisturbed, and the next calmest ones if there are fewer than `count`."""
    enough = min([machine.SLOWED_BELOW, *sorted(paces, reverse=True)[:count]])
    return [item for item, pace in zip(timed, paces) if pace >= enough]


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
