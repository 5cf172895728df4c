"""gpt.py bench --tune: it finds the best tile within the budget and keeps it."""

import pytest

from shakespeare.attention_ext import default_tile
from shakespeare.lab.bench import plan, tune
from shakespeare.lab.bench.sweep import Sweep


def test_tuning_finds_the_fastest_within_the_budget(monkeypatch, extension):
    """Each tile takes a time that is known: a clock that only the calls move. The last begins within it."""
    clock, calls = [0.0], []

    def pretend(part, q, k, v, *, causal, br, bc, simd):
        calls.append(clock[0])
        clock[0] += 0.01 + 0.001 * abs(br - 48) / 48 + 0.001 * abs(bc - 128) / 128

    monkeypatch.setattr(tune, "attention", pretend)
    monkeypatch.setattr(tune.time, "perf_counter", lambda: clock[0])
    (cell,) = plan.plan(["part4"], Sweep(lengths=[1024], widths=[16]))
    *_, last = tune.tune(cell, budget=60)
    assert (last.br, last.bc) == (48, 128)
    assert last.seconds == pytest.approx(0.01) and last.default_seconds == pytest.approx(0.01 + 0.004)
    clock[0] = 0.0
    assert list(tune.tune(cell, budget=3))
    assert 0.9 * 3 < calls[-1] - 0.03 <= 3  # after two calls of the default tile


def test_the_command_keeps_and_shows_it(cli, extension):
    shown = cli("bench", "--tune", "--show")
    assert "Nothing is kept for this processor" in shown.stdout
    done = cli("bench", "--tune", "-N", 64, "-d", "16,24", "--budget", 0.5)
    assert [(t.d, t.N, t.threads) for t in default_tile.read()] == [(16, 64, 1), (24, 64, 1)]
    shown = cli("bench", "--tune", "--show")
    assert tune.text(default_tile.read()) in done.stdout and tune.text(default_tile.read()) in shown.stdout
