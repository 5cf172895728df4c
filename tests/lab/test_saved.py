"""Files of results: their names, and how they are written."""

from __future__ import annotations

import json
import os

import pytest

from shakespeare.attention_ext import processor
from shakespeare.lab import saved


def test_the_default_file_names_the_kind_and_the_processor(monkeypatch):
    monkeypatch.setattr(processor, "slug", lambda: "amd-zen-5")
    assert saved.default_file("bench") == saved.RESULTS / "bench-amd-zen-5.json"
    assert saved.RESULTS.is_dir() and saved.RESULTS.parts[-2:] == ("benchmarks", "results")


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    saved.write({"a": 1}, tmp_path / "x.json")

    def full(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        saved.write({"a": 2}, tmp_path / "x.json")
    assert [json.loads(file.read_text()) for file in tmp_path.iterdir()] == [{"a": 1}]
