"""gpt.py bench --tune: it finds the best tile within the budget and keeps it."""

from __future__ import annotations

import pytest

from attention_ext import tiles
from attention_ext.tiles import DEFAULT
from lab.bench import cases, tune


def cell(N=160, **change):
    return cases.plan(["part4"], lengths=[N], widths=[16], **change)[0]


def test_the_candidates_hold_the_default_first():
    assert tune.candidates(1024)[0] == DEFAULT
    assert tune.candidates(100)[0] == (100, 100)
    assert set(tune.candidates(1024, [32, 64], [128])) == {DEFAULT, (32, 128), (64, 128)}
    assert len(set(tune.candidates(2048))) == len(tune.candidates(2048)) > 50
    assert tune.candidates(1) == [(1, 1)]


def test_tuning_finds_the_fastest(monkeypatch, extension):
    """Each tile takes a time that is known: a clock that only the calls move."""
    clock = [0.0]

    def pretend(part, q, k, v, *, causal, br, bc, simd):
        clock[0] += 0.01 + 0.001 * abs(br - 48) / 48 + 0.001 * abs(bc - 128) / 128

    monkeypatch.setattr(tune, "attention", pretend)
    monkeypatch.setattr(tune.time, "perf_counter", lambda: clock[0])
    *_, last = tune.tune(cell(1024), budget=60)
    assert (last.br, last.bc) == (48, 128)
    assert last.seconds == pytest.approx(0.01) and last.default_seconds == pytest.approx(0.01 + 0.004)


@pytest.mark.parametrize("budget", [0.5, 3.0])
def test_the_budget_is_kept(monkeypatch, extension, budget):
    """The last call begins within the budget; two calls of the default tile come before it."""
    clock, calls = [0.0], []

    def pretend(part, q, k, v, **options):
        calls.append(clock[0])
        clock[0] += 0.01

    monkeypatch.setattr(tune, "attention", pretend)
    monkeypatch.setattr(tune.time, "perf_counter", lambda: clock[0])
    assert list(tune.tune(cell(), budget=budget))
    assert 0.9 * budget < calls[-1] - 0.02 <= budget


def test_the_command_keeps_and_shows_it(cli, extension):
    shown = cli("bench", "--tune", "--show")
    assert shown.returncode == 0 and "Nothing is kept for this processor" in shown.stdout
    done = cli("bench", "--tune", "-N", 64, "-d", "16,24", "--budget", 0.5)
    assert done.returncode == 0, done.stderr
    assert [(t.d, t.N, t.threads) for t in tiles.read()] == [(16, 64, 1), (24, 64, 1)]
    shown = cli("bench", "--tune", "--show")
    assert tune.text(tiles.read()) in done.stdout and tune.text(tiles.read()) in shown.stdout
