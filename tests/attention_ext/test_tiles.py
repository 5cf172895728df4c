"""Tuned tiles: their file, their use by part 4, and broken files, which do no harm."""

from __future__ import annotations

import json

import pytest
import torch

import attention_ext
from attention_ext import attention, processor, tiles
from attention_ext.tiles import DEFAULT, Tuned

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


def test_another_case_or_processor_takes_the_default(monkeypatch):
    tiles.write([FOUND])
    for change in (dict(simd="ispc"), dict(threads=2), dict(d=32), dict(causal=True)):
        case = dict(simd="portable", threads=1, d=16, N=1000, causal=False) | change
        assert tiles.tile(*case.values()) == DEFAULT, change
    monkeypatch.setattr(processor, "name", lambda: "another one")
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


def test_part4_takes_the_tuned_tile(monkeypatch, threads):
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
