"""The processor that this runs on, as the system describes it."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def name() -> str:
    """The processor's name, for people and for what is kept by processor."""
    values = dict(_fields())
    if "model name" in values:
        return "{model name}, family {cpu family}, model {model}".format_map(values)
    if "CPU part" in values:  # ARM
        return "ARM implementer {CPU implementer}, part {CPU part}".format_map(values)
    return _fallback()


def capabilities() -> str:
    """All that the compiler's -march=native depends on."""
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(f"{field}: {value}" for field, value in _fields() if field in kept) or _fallback()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def let_waiting_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait; it works only before torch is imported.

    By default they spin. A process that takes one of two processors then slows PyTorch by 2 to 5 times, and
    more load by 20 times and more; sleeping threads keep it below 2.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _fields() -> list[tuple[str, str]]:
    """What Linux says of the first core; nothing elsewhere."""
    try:
        lines = CPUINFO.read_text().split("\n\n")[0].splitlines()
    except OSError:
        return []
    return [(field.strip(), value.strip()) for field, _, value in (line.partition(":") for line in lines)]


def _fallback() -> str:
    return f"{platform.machine()} {platform.processor()}".strip()
