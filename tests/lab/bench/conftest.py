"""A quiet machine, and a run whose figures are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab import machine
from lab.bench.cases import plan
from lab.bench.results import Result, Run
from lab.costs import COUNTS


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
def made() -> Callable[..., Run]:
    """Make a run with known figures: 1 ms with a little spread, times `change` for part4."""

    def make(change=1.0, rounds=10, names=("part0", "part4", "sdpa"), **fields):
        done = Run(
            {"cpu": "a", "date": "today", "caches": [], "cores": 1}
            | dict.fromkeys(("isa", "simd", "os", "python", "torch", "commit"), "x"),
            rounds,
            0.1,
            1 << 20,
        )
        done.peaks, done.bandwidths, done.complete = {1: 1e11, 2: 2e11}, {1: 1e10, 2: 2e10}, True
        sizes = dict(lengths=(64, 128), widths=(16,), threads=(1, 2)) | fields
        for cell in plan(names, **sizes):
            factor = change if cell.contender == "part4" else 1
            seconds = [1e-3 * cell.N / 64 * factor * (1 + 0.001 * i) for i in range(rounds)]
            result = Result(cell, error=1e-7, error_at=(0, 0, 0, 0), scratch=1000, seconds=seconds)
            result.paces = [1.0] * rounds
            result.traffic = 1000.0 if cell.contender in COUNTS else None
            done.results.append(result)
        return done

    return make
