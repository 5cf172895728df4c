"""The machine: its limits, its memory, and the load by other programs."""

from __future__ import annotations

import pytest

from lab import machine


def test_the_closing_text_says_whether_the_machine_was_busy():
    load = machine.Load(times=lambda: None)
    text, busy = machine.closing_text(load, [1e11, 1.02e11], 1)
    assert (text, busy) == ("FMA peak of one thread: 100 GFLOP/s before, 102 after", False)
    text, busy = machine.closing_text(load, [1e11, 0.8e11], 1)
    assert "\nThe machine was busy: the FMA peak went from 100 to 80 GFLOP/s" in text and busy


def test_slowed_reading_is_named():
    """The cause may be a program on another core that shares the last cache."""
    reads = iter([1e11, 9.7e10, 9e10, 1e11])
    load = machine.Load(times=lambda: None, read=lambda size, seconds: next(reads))
    assert load.slowed() == 0 and machine.busy(load, [1e11, 1e11], 1) is None
    assert [load.sample(1 << 20) for _ in range(4)] == [1, 0.97, 0.9, 1] and load.slowed() == 0.25
    assert "in 25 % of samples; these figures are not firm" in machine.busy(load, [1e11, 1e11], 1)


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
