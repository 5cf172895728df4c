"""The machine that a measurement is made on: what it is, what it can do at most, whether it was all ours."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from attention_ext import AUTO, __version__, extension, processor

BUSY = 0.05  # share of the measured threads' time that others may take before it is said
SAMPLE = 2e-4  # seconds
SLOWED, OFTEN = 0.95, 0.1  # a sample below that share of the fastest is slowed; how many may be
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Load:
    """What others take: processor time, and the bandwidth of the cache and memory that are shared with them.

    The time is that of /proc/stat, None where there is none; child processes that have ended and been waited
    for are no others. Who has another core, or another virtual machine, shows in the bandwidth alone.
    """

    def __init__(self) -> None:
        self.start = self._now()
        self._samples: list[float] = []  # bytes per second
        self._fastest = 0.0

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

    def sample(self, size: int, patience: float = 0.0) -> float:
        """How fast this thread reads `size` bytes now, more than its core's caches hold; 1: as fast as ever.

        patience: seconds to wait at most until it is not slowed. Only the first sample is kept.
        """
        operators, end = extension.load(), time.perf_counter() + patience
        self._samples.append(operators.read_bandwidth(size, SAMPLE))
        rate, self._fastest = self._samples[-1], max(self._samples[-1], self._fastest)
        while rate < SLOWED * self._fastest and time.perf_counter() < end:
            rate = operators.read_bandwidth(size, SAMPLE)
        return min(1.0, rate / self._fastest)

    def slowed(self) -> float:
        """The share of samples that were slowed."""
        return sum(rate < SLOWED * self._fastest for rate in self._samples) / max(1, len(self._samples))


def fma_peak(simd: str = "auto", threads: int = 1) -> float:
    """Floating-point operations per second of so many threads at once, at best."""
    operators = extension.load(simd)
    return _on(threads, lambda: operators.fma_peak(0.3))


def fma_latency() -> float:
    """Seconds of a multiply-add that waits for the one before it, at best."""
    return extension.load().fma_latency(0.1)


def read_bandwidth(size: int, threads: int = 1) -> float:
    """Bytes per second that so many threads read at once, each from `size` bytes that it has read before."""
    operators = extension.load()
    return _on(threads, lambda: operators.read_bandwidth(size, 0.3))


def _on(threads: int, work: Callable[[], float]) -> float:
    """The sum of work() on so many threads, as far as there are cores, at the same time.

    Operators release the GIL.
    """
    threads = min(threads, processor.cores())
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: work(), range(threads)))


def busy(load: Load, peaks: list[float], threads: int) -> str | None:
    """Why figures taken since `load` was made are not firm; None if nothing speaks against them.

    peaks: the FMA peak, before and after.
    """
    others = load.others()
    reasons = []
    if others is not None and others > BUSY * min(threads, processor.cores()):
        reasons.append(f"others took {others:.2f} processors on average")
    if (slowed := load.slowed()) > OFTEN:
        reasons.append(f"the shared cache was slow in {100 * slowed:.0f} % of samples")
    if max(peaks) / min(peaks) > 1 + BUSY:
        reasons.append(f"the FMA peak went from {peaks[0] / 1e9:.0f} to {peaks[-1] / 1e9:.0f} GFLOP/s")
    if not reasons:
        return None
    firm = "with several threads they mean nothing" if threads > 1 else "these figures are not firm"
    return f"The machine was busy: {' and '.join(reasons)}; {firm}."


def end(load: Load, peaks: list[float], threads: int) -> None:
    """Say what the peak was; if the machine was busy, say that too and exit with 3."""
    click.echo(f"\nFMA peak of one thread: {peaks[0] / 1e9:.0f} GFLOP/s before, {peaks[1] / 1e9:.0f} after")
    if reason := busy(load, peaks, threads):
        click.echo(reason)
        sys.exit(3)


@dataclass(frozen=True)
class Cache:
    """A data cache of one processor; bytes, ways and the bytes of a line."""

    level: int
    size: int
    ways: int
    line: int


# Where the system does not tell: a common processor's.
ASSUMED = (Cache(1, 32 << 10, 8, 64), Cache(2, 1 << 20, 16, 64), Cache(3, 32 << 20, 16, 64))


def caches() -> tuple[Cache, ...]:
    """This processor's data caches, the smallest first; ASSUMED where the system does not tell."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            size = _bytes((index / "size").read_text().strip())
            ways = int((index / "ways_of_associativity").read_text())
            line = int((index / "coherency_line_size").read_text())
        except (OSError, ValueError):
            continue
        if min(size, ways, line) > 0:
            found[level] = Cache(level, size, ways, line)
    return tuple(found[level] for level in sorted(found)) or ASSUMED


def _bytes(text: str) -> int:
    """'1024K' as bytes."""
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    return int(text.rstrip("KM")) * unit


def available_memory() -> int | None:
    """Bytes that programs can still have without others being paged out; None where it is not told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to 2 GB in all; elsewhere nothing is done.

    Whether it gives a large block back at once, whose pages are then cleared anew at the next call, otherwise
    depends on all that was allocated before: one run of part0 took 1.8 times as long as another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # from malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def return_freed_memory() -> None:
    """Let glibc give what is freed back to the system; elsewhere nothing is done.

    A large block otherwise gets the pages of the one before it, and where in memory they lie is worth up to
    7 % of the time where matrices live in the shared cache.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def page_faults() -> int:
    """How many pages of memory the system has handed out to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def describe() -> dict:
    """What stands at the head of a table of figures: processor, caches, SIMD, versions, commit, date."""
    return {
        "cpu": processor.name(),
        "cores": processor.cores(),
        "caches": [asdict(cache) for cache in caches()],
        "isa": torch.backends.cpu.get_cpu_capability(),
        "simd": AUTO,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "version": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def commit() -> str | None:
    """The commit that this code is, with a + where files differ from it; None outside a git checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    try:
        name, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.strip() + "+" * bool(changed.strip())


def size_text(size: float) -> str:
    """Bytes for people: 4718592 as '4.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
