"""What the benchmarks ask of the machine: what it can do at most, and whether it was theirs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from attention_ext import build

BUSY = 0.05  # share of the measured threads' time that others may take before it is said


class Load:
    """How much processor time other processes take, from /proc/stat; None where there is none.

    Child processes that have ended and been waited for are no others.
    """

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = fields[:8]
        ticks = os.sysconf("SC_CLK_TCK")
        busy = (user + nice + system + irq + softirq + steal) / ticks
        times = os.times()
        own = time.process_time() + times.children_user + times.children_system
        return busy, own, time.monotonic()

    def others(self) -> float | None:
        """Processors taken by others, on average since this was made."""
        now = self._now()
        if now is None or self.start is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self.start, now))
        return max(0.0, busy - own) / wall


def fma_peak(simd: str) -> float:
    """Floating-point operations per second of one thread, at best."""
    return build.load(simd).fma_peak(0.3)


def read_bandwidth(size: int) -> float:
    """Bytes per second that one thread reads, at best, from `size` bytes that it has read before."""
    return build.load().read_bandwidth(size, 0.3)


def end(load: Load, peaks: list[float], threads: int) -> None:
    """Say what the peak was; if the machine was busy, say that too and exit with 3."""
    click.echo(f"\nFMA peak of one thread: {peaks[0] / 1e9:.0f} GFLOP/s before, {peaks[1] / 1e9:.0f} after")
    others = load.others()
    if max(peaks) / min(peaks) > 1 + BUSY or (others is not None and others > BUSY * threads):
        taken = "an unknown number of" if others is None else f"{others:.2f}"
        click.echo(
            f"The machine was busy: others took {taken} processors on average. These figures are not firm"
            + (", and with several threads they mean nothing." if threads > 1 else ".")
        )
        sys.exit(3)
