"""A quiet machine for the tests of bench."""

import pytest

from shakespeare.lab import machine


@pytest.fixture
def run(quiet, cli, monkeypatch):
    quiet(machine)
    monkeypatch.setattr(machine, "page_faults", lambda: 0)
    monkeypatch.setattr(machine, "read_bandwidth", lambda size, threads=1: 1e10)
    return lambda *arguments, **settings: cli("bench", *arguments, **settings)
