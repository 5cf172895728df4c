"""Files of results: their names, and how they are written."""

from __future__ import annotations

import json

import pytest

from attention_ext import processor
from lab import saved


def test_the_default_file_names_the_kind_and_the_processor(monkeypatch):
    monkeypatch.setattr(processor, "slug", lambda: "amd-zen-5")
    assert saved.default_file("bench") == saved.RESULTS / "bench-amd-zen-5.json"
    assert saved.RESULTS.is_dir() and saved.RESULTS.parts[-2:] == ("benchmarks", "results")


def test_a_list_of_numbers_is_a_line(tmp_path):
    """A text that looks like a list keeps its spaces."""
    content = {"numbers": [1, 2.5e-05, -3], "none": [], "text": "[1,  2]", "texts": ["a", "b"]}
    saved.write(content, tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == content
    assert '"numbers": [1, 2.5e-05, -3],\n' in text and text.count("\n") == 9
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    saved.write({"a": 1}, tmp_path / "x.json")

    def full(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(saved.os, "replace", full)
    with pytest.raises(OSError):
        saved.write({"a": 2}, tmp_path / "x.json")
    assert [json.loads(file.read_text()) for file in tmp_path.iterdir()] == [{"a": 1}]
