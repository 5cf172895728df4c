"""The machine: its limits, its memory, and the load by other programs."""

import math
import resource

import pytest

from shakespeare.attention_ext import processor
from shakespeare.lab import machine


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
    assert "and the FMA peak went from 100 to 80 GFLOP/s" in machine.busy(load, [1e11, 0.8e11], 1)


def test_the_load_of_others_is_what_this_process_did_not_use(monkeypatch):
    """Processor seconds: 5 of the machine, 2 of this process, so 3 of others, in 4 seconds of wall time."""
    times = iter([(100.0, 10.0, 1000.0), (105.0, 12.0, 1004.0), None, None])
    monkeypatch.setattr(machine, "processor_times", lambda: next(times))
    assert machine.Load().others() == pytest.approx(0.75)
    assert machine.Load().others() is None


def test_the_least_limit_of_memory_counts(monkeypatch, tmp_path):
    """A container's limit, or that of a group above it, without the cached files, which can be dropped."""
    monkeypatch.setattr(processor, "GROUPS", tmp_path)
    monkeypatch.setattr(processor, "GROUPS_OF_PROCESS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("4:cpu,memory:/a/b\n0::/a/b\n")
    above, own = tmp_path / "a", tmp_path / "memory" / "a" / "b"
    for folder, files in (
        (above, {"memory.max": "max", "memory.current": "3000000"}),
        (own, {"memory.limit_in_bytes": "7000000", "memory.usage_in_bytes": "4000000"}),
    ):
        folder.mkdir(parents=True)
        (folder / "memory.stat").write_text(
            "anon 9\nactive_file 500\ninactive_file 1000\ntotal_active_file 70\ntotal_inactive_file 7\n"
        )
        for name, number in files.items():
            (folder / name).write_text(f"{number}\n")
    assert machine.available_memory() == 3_000_077
    (above / "memory.max").write_text("5000000\n")
    assert machine.available_memory() == 2_001_500
    (above / "memory.max").write_text("1\n")
    assert machine.available_memory() == 0
    (tmp_path / "cgroup").unlink()
    for number in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        limits = {number: (2**50, 2**60)}
        monkeypatch.setattr(resource, "getrlimit", lambda asked: limits.get(asked, (-1, -1)))
        assert machine.available_memory() > 2**20
        limits[number] = (2**20, 2**60)  # this process has more already
        assert machine.available_memory() == 0


def test_the_limits_are_plausible(extension):
    """Beside each other, not beside figures of a machine; a busy one may take several tries."""

    def holds(ratio, least: float, most: float = math.inf) -> bool:
        return any(least < ratio() < most for _ in range(100))

    assert holds(machine.nop_rate, 0)
    # an FMA is two operations, on several lanes and in several units
    assert holds(lambda: machine.fma_peak() * machine.fma_latency(), 4, 4096)
    assert holds(lambda: machine.read_rate(1 << 20) / machine.read_bandwidth(1 << 20), 0.1, 10)
    # a vector of numbers is read for a few multiply-adds, and not for thousands
    assert holds(lambda: machine.fma_peak() / machine.read_bandwidth(1 << 14), 0.01, 100)
