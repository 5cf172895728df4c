"""A quiet machine, and a run whose figures are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import bench_run

from lab import machine


@pytest.fixture
def steady(quiet, monkeypatch):
    """A quiet, steady machine."""
    quiet(machine)
    monkeypatch.setattr(machine, "page_faults", lambda: 0)
    monkeypatch.setattr(machine, "read_bandwidth", lambda size, threads=1: 1e10)


@pytest.fixture
def run(steady, cli):
    """Run `gpt.py bench` over small cases on a quiet, steady machine."""
    return lambda *arguments: cli("bench", *arguments)


@pytest.fixture
def rows() -> Callable:
    """Read the Markdown table that a command printed, as dictionaries."""

    def read(done):
        assert done.returncode == 0, done.stderr
        lines = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("|")]
        return [dict(zip(map(str.strip, lines[0]), map(str.strip, line))) for line in lines[2:]]

    return read


@pytest.fixture
def made():
    """Make a run with known figures, see support.bench_run()."""
    return bench_run
