"""Fixtures for the tests of bench: a quiet machine, and a run with known figures."""

from collections.abc import Callable

import pytest
from support import bench_run

from shakespeare.lab import machine


@pytest.fixture
def run(quiet, cli, monkeypatch):
    """Run `gpt.py bench`, as on a quiet, steady machine."""
    quiet(machine)
    monkeypatch.setattr(machine, "page_faults", lambda: 0)
    monkeypatch.setattr(machine, "read_bandwidth", lambda size, threads=1: 1e10)
    return lambda *arguments: cli("bench", *arguments)


@pytest.fixture
def rows() -> Callable:
    """Read the Markdown table that a command printed; each row is a dictionary."""

    def read(done):
        lines = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("|")]
        return [dict(zip(map(str.strip, lines[0]), map(str.strip, line))) for line in lines[2:]]

    return read


@pytest.fixture
def made():
    """Make a run with known figures, see support.bench_run()."""
    return bench_run
