"""The machine: its limits, its memory, and the load by other programs."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from lab import machine


def test_the_closing_text_says_whether_the_machine_was_busy():
    load = machine.Load(times=lambda: None)
    text, busy = machine.closing_text(load, [1e11, 1.02e11], 1)
    assert (text, busy) == ("FMA peak of one thread: 100 GFLOP/s before, 102 after", False)
    text, busy = machine.closing_text(load, [1e11, 0.8e11], 1)
    assert "\nThe machine was busy: the FMA peak went from 100 to 80 GFLOP/s" in text and busy


@pytest.mark.parametrize("rates, slowed", [([1e11, 9.7e10, 9e10, 1e11], 25), ([9e10, 8.8e10], 0), ([], 0)])
def test_slowed_reading_is_named(rates, slowed):
    """The cause may be a program on another core that shares the last cache."""
    reads = iter(rates)
    load = machine.Load(times=lambda: None, read=lambda size, seconds: next(reads))
    fastest = 0.0
    for rate in rates:
        fastest = max(fastest, rate)
        assert load.sample(1 << 20) == rate / fastest
    assert load.slowed() == slowed / 100
    reason = machine.busy(load, [1e11, 1e11], 1)
    assert (f"in {slowed} % of samples; these figures are not firm" in reason) if slowed else reason is None


def test_a_sample_waits_until_reading_is_fast():
    """It waits `patience` seconds at most. Only the first reading decides whether the sample was slowed."""
    rates, now = iter([100.0, 90.0, 94.0, 95.0, 80.0]), [0.0]

    def read(size, seconds):
        now[0] += 0.004
        return next(rates, 50.0)

    load = machine.Load(read=read, now=lambda: now[0])
    assert load.sample(1 << 20, patience=9) == 1
    assert load.sample(1 << 20, patience=9) == 0.95 and load.slowed() == 1 / 2
    assert load.sample(1 << 20) == 0.8
    before = now[0]
    assert load.sample(1 << 20, patience=0.01) == 0.5 and load.slowed() == 3 / 4
    assert now[0] - before == pytest.approx(0.012)


def test_the_load_of_others_is_what_this_process_did_not_use():
    """Processor seconds: 5 of the machine, 2 of this process, so 3 of others, in 4 seconds of wall time."""
    times = iter([machine.Times(100.0, 10.0, 1000.0), machine.Times(105.0, 12.0, 1004.0)])
    assert machine.Load(times=lambda: next(times)).others() == pytest.approx(0.75)
    assert machine.Load(times=lambda: None).others() is None


def test_the_limits_are_plausible(extension):
    assert 1e9 < machine.fma_peak() < 1e12
    assert 1e8 < machine.read_bandwidth(1 << 20) < 1e13
    assert 1e8 < machine.read_rate(1 << 20, 0.0) < 1e13  # it reads at least once
    assert 1e-10 < machine.fma_latency() < 1e-7
    assert machine.fma_peak() * machine.fma_latency() > 4  # an FMA is two operations, on several lanes


FREED = """
import os, torch
from lab import machine

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

machine.keep_freed_memory()
block = torch.ones(64 << 20, dtype=torch.uint8)
above = torch.ones(1 << 10)  # keeps the block from being the heap's end
del block
kept = resident()
machine.return_freed_memory()
print(kept - resident(), int(above.sum()))
"""


@pytest.mark.full
def test_freed_memory_is_returned():
    """In a new process: where a block lies depends on all earlier allocations."""
    if not Path("/proc/self/statm").exists() or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs Linux and glibc")
    done = subprocess.run([sys.executable, "-c", FREED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    returned, total = map(int, done.stdout.split())
    assert returned > 60 << 20 and total == 1 << 10
