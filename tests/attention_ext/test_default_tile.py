"""Tuned tiles: their file, their use by part 4, and broken files, which do no harm."""

import dataclasses
import json

import pytest
import torch
from support import naming

from shakespeare import attention_ext
from shakespeare.attention_ext import BuildError, attention, default_tile, processor
from shakespeare.attention_ext.build import cache
from shakespeare.attention_ext.default_tile import DEFAULT, Tuned

FOUND = Tuned("portable", 1, 16, 1000, False, br=48, bc=96, seconds=1.0, default_seconds=1.5)


def test_what_is_written_is_read_and_replaced():
    assert default_tile.read() == [] and default_tile.tile("portable", 1, 16, 1000, False) == DEFAULT
    default_tile.write([FOUND])
    written = [dataclasses.replace(FOUND, br=64), dataclasses.replace(FOUND, N=4000, br=128, bc=512)]
    default_tile.write(written)
    assert default_tile.read() == written
    taken = [default_tile.tile("portable", 1, 16, N, False) for N in (499, 500, 1999, 2001, 8000, 8001)]
    assert taken == [DEFAULT, (64, 96), (64, 96), (128, 512), (128, 512), DEFAULT]


def test_another_processor_takes_the_default(monkeypatch):
    default_tile.write([FOUND])
    monkeypatch.setattr(processor, "name", lambda: "another one")
    default_tile.forget()
    assert default_tile.tile("portable", 1, 16, 1000, False) == DEFAULT
    default_tile.write([FOUND])
    assert len(json.loads(default_tile.path().read_text())) == 2


def test_without_a_home_directory_there_is_none(monkeypatch):
    for name in ("ATTENTION_TILES", "XDG_CACHE_HOME", "HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert default_tile.read() == []
    with pytest.raises(BuildError, match="home directory.*; TORCH_EXTENSIONS_DIR can name another directory"):
        cache.directory()


def test_a_broken_file_is_refused_and_does_no_harm():
    default_tile.write([FOUND])
    changed = default_tile.path().read_text().replace('"br": 48', '"br": -1')
    for content in ("", "[]", '{"cpu": 1}', '{"cpu": [{}]}', "{", changed):
        default_tile.path().write_text(content)
        default_tile.forget()
        with naming(content):
            with pytest.raises(ValueError, match="is not a file of tile sizes"):
                default_tile.read()
            assert default_tile.tile("portable", 1, 16, 1000, False) == DEFAULT
            default_tile.write([FOUND])
            assert default_tile.read() == [FOUND]


def test_part4_takes_the_tuned_tile(monkeypatch, threads):
    taken = []

    def operator(part, simd, gradient, ruled):
        return lambda q, k, v, causal, scale, return_lse, *tile: (taken.append(tile), (q, None))[1]

    monkeypatch.setattr(attention_ext, "operator", operator)
    default_tile.write([FOUND])
    q = torch.zeros(1, 1, 1000, 16)
    for count, given in ((1, {}), (1, {"br": 7}), (1, {"br": 7, "bc": 9}), (1, {"causal": True}), (2, {})):
        threads(count)
        attention("part4", q, q, q, **given)
    assert taken[:4] == [(48, 96), (7, 96), (7, 9), DEFAULT] and taken[4] != (48, 96)
