"""The machine that a measurement runs on: its description, its limits, and the load of other programs."""

import contextlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from shakespeare import __version__
from shakespeare.attention_ext import AUTO, BuildError, extension, processor
from shakespeare.attention_ext.build import toolchain
from shakespeare.lab.formats import size_text
from shakespeare.lab.subprocesses import ROOT

BUSY_SHARE = 0.05  # on a busy machine others take more than this share of the measured threads' time
SAMPLE_SECONDS = 2e-4
LIMIT_SECONDS = 0.3  # time in which a limit of the machine is measured
SLOWED_BELOW = 0.95  # a sample below this share of the fastest is slowed, any other quiet
MAX_SLOWED_SHARE = 0.1  # on a busy machine a larger share of the samples is slowed
# Files of control groups, version 2 and 1: the limit, its use, and in memory.stat what memory can drop.
GROUP_FILES = (
    ("memory.max", "memory.current", "(?:in)?active_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file"),
)


def processor_times() -> tuple[float, float, float] | None:
    """Seconds by /proc/stat; None without it: of the machine's processors, of this process's, and wall time.

    A child process counts as this process after it has ended and been waited for.
    """
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return busy, time.process_time() + times.children_user + times.children_system, time.monotonic()


def read_rate(size: int) -> float:
    """Bytes per second at which this thread reads the same `size` bytes for SAMPLE_SECONDS."""
    return extension.load().read_bandwidth(size, SAMPLE_SECONDS)


def nop_rate() -> float:
    """Loops of NOPs per second that this thread does now; one takes some 10 us."""
    return 1 / extension.load().nops()


class Load:
    """The load of other programs: processor time, NOP rate and shared cache bandwidth.

    Another virtual machine shows only in a sample: on this core in NOPs, on another in the bandwidth.
    """

    def __init__(self) -> None:
        self._start = processor_times()
        self._samples: list[tuple[float, float]] = []  # bytes and loops of NOPs per second
        self._fastest = 0.0, 0.0

    def others(self) -> float | None:
        """The mean number of processors that other programs took since this was made; None if unknown."""
        now = processor_times()
        if now is None or self._start is None:
            return None
        busy, ours, wall = (b - a for a, b in zip(self._start, now))
        return max(0.0, busy - ours) / wall

    def sample(self, size: int = 0, patience: float = 0.0) -> float:
        """The lower speed of NOPs or of reading `size` bytes on this thread, over the fastest so far.

        size: more than private caches hold; 0 reads none. patience: the longest wait. A call's first is kept.
        """

        def measure() -> tuple[float, float]:
            rates = read_rate(size) if size else 1.0, nop_rate()
            self._fastest = max(rates[0], self._fastest[0]), max(rates[1], self._fastest[1])
            return rates

        end = time.perf_counter() + patience
        rates = measure()
        self._samples.append(rates)
        while self._share(rates) < SLOWED_BELOW and time.perf_counter() < end:
            rates = measure()
        return self._share(rates)

    def _share(self, rates: tuple[float, float]) -> float:
        return min(rate / fastest for rate, fastest in zip(rates, self._fastest))

    def slowed(self) -> float:
        """The share of samples that were slowed."""
        return sum(self._share(rates) < SLOWED_BELOW for rates in self._samples) / max(1, len(self._samples))


def fma_peak(threads: int = 1) -> float:
    """The highest number of floating-point operations per second of `threads` threads together."""
    return _on(threads, extension.load().fma_peak, LIMIT_SECONDS)


def amx_peak(threads: int) -> float:
    """The highest rate of AMX's products in bfloat16; 0 without AMX."""
    return _on(threads, extension.load().amx_peak, LIMIT_SECONDS)


def fma_latency() -> float:
    """The lowest latency of a multiply-add in seconds, from a chain of dependent ones."""
    return extension.load().fma_latency(0.1)


def read_bandwidth(size: int, threads: int = 1) -> float:
    """Bytes per second that `threads` threads read together, each from `size` bytes already read before."""
    return _on(threads, extension.load().read_bandwidth, size, LIMIT_SECONDS)


def _on(threads: int, limit: Callable[..., float], *arguments: float) -> float:
    """The sum of a limit on so many threads at once, at most one for each core. Operators release the GIL."""
    threads = min(threads, processor.cores())
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: limit(*arguments), range(threads)))


def busy(load: Load, peaks: list[float], threads: int) -> str | None:
    """The reason why figures since `load` was made are not firm, else None. peaks: before and after."""
    reasons = taken(load.others(), min(threads, processor.cores()))
    slowed = load.slowed()
    if slowed > MAX_SLOWED_SHARE:
        reasons.append(f"the core or the shared cache was slow in {100 * slowed:.0f} % of samples")
    if max(peaks) / min(peaks) > 1 + BUSY_SHARE:
        reasons.append(f"the FMA peak went from {peaks[0] / 1e9:.0f} to {peaks[-1] / 1e9:.0f} GFLOP/s")
    if not reasons:
        return None
    firm = "with several threads they mean nothing" if threads > 1 else "these figures are not firm"
    return f"The machine was busy: {' and '.join(reasons)}; {firm}."


def taken(others: float | None, threads: int) -> list[str]:
    """In a list, how many processors others took, if that is known and too much beside so many threads."""
    much = others is not None and others > BUSY_SHARE * threads
    return [f"others took {others:.2f} processors on average"] if much else []


def busy_text(others: float | None, threads: int) -> list[str]:
    """The last line of a table of figures, if others took too many processors."""
    return [f"The machine was busy: {reason}." for reason in taken(others, threads)]


def available_memory() -> int | None:
    """Bytes that this process can still allocate without swapping; None if the system does not report it.

    The least of what the machine has left, of each control group's limit, as a container's, and of ulimit's.
    """
    left = []
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left.append(next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")))
    for folder in processor.control_groups("memory"):
        for limit, usage, cached in GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # this file is missing, or has no limit: "max"
                free = int((folder / limit).read_text()) - int((folder / usage).read_text())
                files = re.findall(rf"^{cached} (\d+)$", (folder / "memory.stat").read_text(), re.M)
                left.append(free + sum(map(int, files)))
    with contextlib.suppress(OSError, ModuleNotFoundError):  # Windows has neither
        import resource

        pages = Path("/proc/self/statm").read_text().split()
        for number, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            soft, _ = resource.getrlimit(number)
            if soft != resource.RLIM_INFINITY:
                left.append(soft - int(used) * resource.getpagesize())
    return max(0, min(left)) if left else None


def check_memory(what: str, need: float, available: float | None = None) -> None:
    """Raise ValueError, which says `what` needs so many bytes, if `available` (default: free) are fewer."""
    available = available_memory() if available is None else available
    if available is not None and need > available:
        raise ValueError(f"{what} need {size_text(need)}, and {size_text(available)} are free")


def page_faults() -> int:
    """The number of memory pages that the system has given to this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def describe() -> dict:
    """The head of a table of figures: processor, caches, SIMD, versions, commit, date."""
    return {
        "cpu": processor.name(),
        "microarchitecture": processor.microarchitecture(),
        "cores": processor.cores(),
        "caches": [asdict(cache) for cache in processor.caches()],
        "isa": torch.backends.cpu.get_cpu_capability(),
        "simd": AUTO,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": compiler(),
        "version": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def compiler() -> str | None:
    """The first line of the C++ compiler's --version; None without a compiler that runs."""
    try:
        lines = toolchain.version(*toolchain.find_compiler()).decode(errors="replace").splitlines()
    except BuildError:
        return None
    return lines[0] if lines else None


def commit() -> str | None:
    """The commit of this code, with a + if files differ from it; None outside a git checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]  # no tag: the commit's hash
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
