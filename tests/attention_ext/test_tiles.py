"""Tuned tiles: what is kept, that part 4 takes it, and that a broken file does no harm."""

from __future__ import annotations

import json

import pytest
import torch

import attention_ext
from attention_ext import attention, tiles
from attention_ext.tiles import DEFAULT, Tuned
from lab import bench, tune

FOUND = Tuned("portable", 1, 16, 1000, False, br=48, bc=96, seconds=1.0, default_seconds=1.5)


def test_without_a_file_there_is_one_default():
    assert tiles.read() == []
    assert tiles.tile("portable", 1, 16, 1000, False) == DEFAULT


def test_what_is_written_is_read_and_replaced():
    tiles.write([FOUND])
    better = Tuned("portable", 1, 16, 1000, False, br=64, bc=96, seconds=0.9, default_seconds=1.5)
    longer = Tuned("portable", 1, 16, 4000, False, br=128, bc=512, seconds=9.0, default_seconds=9.5)
    tiles.write([better, longer])
    assert tiles.read() == [better, longer]
    taken = [tiles.tile("portable", 1, 16, N, False) for N in (499, 500, 1999, 2001, 8000, 8001)]
    assert taken == [DEFAULT, (64, 96), (64, 96), (128, 512), (128, 512), DEFAULT]


OTHERS = [
    ("ispc", 1, 16, 1000, False),
    ("portable", 2, 16, 1000, False),
    ("portable", 1, 32, 1000, False),
    ("portable", 1, 16, 1000, True),
]


@pytest.mark.parametrize("other", OTHERS)
def test_another_case_takes_the_default(other):
    tiles.write([FOUND])
    assert tiles.tile(*other) == DEFAULT


def test_another_processor_takes_the_default(monkeypatch):
    tiles.write([FOUND])
    monkeypatch.setattr(tiles, "processor", lambda: "another one")
    tiles.forget()
    assert tiles.tile("portable", 1, 16, 1000, False) == DEFAULT
    tiles.write([FOUND])
    assert len(json.loads(tiles.path().read_text())) == 2


BROKEN = ["", "[]", '{"cpu": 1}', '{"cpu": [{}]}', "{"]


@pytest.mark.parametrize("content", [*BROKEN, "changed"])
def test_a_broken_file_is_refused_and_does_no_harm(content):
    tiles.write([FOUND])
    if content == "changed":
        content = tiles.path().read_text().replace('"br": 48', '"br": -1')
    tiles.path().write_text(content)
    tiles.forget()
    with pytest.raises(ValueError, match="is not a file of tile sizes"):
        tiles.read()
    assert tiles.tile("portable", 1, 16, 1000, False) == DEFAULT
    tiles.write([FOUND])
    assert tiles.read() == [FOUND]


def test_part4_takes_it(monkeypatch, threads):
    threads(1)
    taken = []

    def operator(part, simd):
        return lambda q, k, v, causal, scale, return_lse, *tile: (taken.append(tile), (q, None))[1]

    monkeypatch.setattr(attention_ext, "operator", operator)
    tiles.write([FOUND])
    q = torch.zeros(1, 1, 1000, 16)
    for given in ({}, {"br": 7}, {"bc": 7}, {"br": 7, "bc": 9}, {"causal": True}):
        attention("part4", q, q, q, **given)
    assert taken == [(48, 96), (7, 96), (48, 7), (7, 9), DEFAULT]


def cell(N=160, **change):
    return bench.plan(["part4"], lengths=[N], widths=[16], **change)[0]


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


def test_a_tile_that_is_hardly_faster_is_not_taken(monkeypatch, extension):
    clock = [0.0]

    def pretend(part, q, k, v, *, causal, br, bc, simd):
        clock[0] += 0.01 if (br, bc) == DEFAULT else 0.00995

    monkeypatch.setattr(tune, "attention", pretend)
    monkeypatch.setattr(tune.time, "perf_counter", lambda: clock[0])
    *_, last = tune.tune(cell(1024), budget=60)
    assert (last.br, last.bc) == DEFAULT


def test_the_budget_is_kept(extension):
    *_, last = tune.tune(cell(), budget=0.3)
    assert 0 < last.seconds <= last.default_seconds
    with pytest.raises(ValueError, match="budget is 0; it must be more than 0"):
        next(tune.tune(cell(), budget=0))
    assert len(list(tune.tune(cell(N=1), budget=0.01))) == 1


def test_the_command_keeps_and_shows_it(cli, extension):
    shown = cli("bench", "--tune", "--show")
    assert shown.returncode == 0 and "Nothing is kept for this processor" in shown.stdout
    done = cli("bench", "--tune", "-N", 64, "-d", "16,24", "--budget", 0.5)
    assert done.returncode == 0, done.stderr
    assert [(t.d, t.N, t.threads) for t in tiles.read()] == [(16, 64, 1), (24, 64, 1)]
    shown = cli("bench", "--tune", "--show")
    assert tune.text(tiles.read()) in done.stdout and tune.text(tiles.read()) in shown.stdout
