"""The machine: its limits, its memory, and the load by other programs."""

from __future__ import annotations

import pytest

from lab import machine


def test_the_closing_text_says_whether_the_machine_was_busy(monkeypatch):
    monkeypatch.setattr(machine, "processor_times", lambda: None)
    load = machine.Load()
    text, busy = machine.closing_text(load, [1e11, 1.02e11], 1)
    assert (text, busy) == ("FMA peak of one thread: 100 GFLOP/s before, 102 after", False)
    text, busy = machine.closing_text(load, [1e11, 0.8e11], 1)
    assert "\nThe machine was busy: the FMA peak went from 100 to 80 GFLOP/s" in text and busy


@pytest.mark.parametrize("slow", ["read_rate", "nop_rate"])
def test_a_slowed_machine_is_named(monkeypatch, slow):
    """The cause may be a program on another core that shares the last cache, or one on this core."""
    reads = iter([1e11, 9.7e10, 9e10, 1e11])
    monkeypatch.setattr(machine, "processor_times", lambda: None)
    monkeypatch.setattr(machine, "read_rate", lambda size: 1e11)
    monkeypatch.setattr(machine, "nop_rate", lambda: 1e5)
    monkeypatch.setattr(machine, slow, lambda *size: next(reads))
    load = machine.Load()
    assert load.slowed() == 0 and machine.busy(load, [1e11, 1e11], 1) is None
    assert [load.sample(1 << 20) for _ in range(4)] == [1, 0.97, 0.9, 1] and load.slowed() == 0.25
    assert "in 25 % of samples; these figures are not firm" in machine.busy(load, [1e11, 1e11], 1)


def test_the_load_of_others_is_what_this_process_did_not_use(monkeypatch):
    """Processor seconds: 5 of the machine, 2 of this process, so 3 of others, in 4 seconds of wall time."""
    times = iter([(100.0, 10.0, 1000.0), (105.0, 12.0, 1004.0), None, None])
    monkeypatch.setattr(machine, "processor_times", lambda: next(times))
    assert machine.Load().others() == pytest.approx(0.75)
    assert machine.Load().others() is None


def test_the_limits_are_plausible(extension):
    assert 1e9 < machine.fma_peak() < 1e12
    assert 1e8 < machine.read_bandwidth(1 << 20) < 1e13
    assert 1e8 < machine.read_rate(1 << 20) < 1e13
    assert 1e3 < machine.nop_rate() < 1e7
    assert 1e-10 < machine.fma_latency() < 1e-7
    assert machine.fma_peak() * machine.fma_latency() > 4  # an FMA is two operations, on several lanes
