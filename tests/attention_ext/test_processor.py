"""attention_ext/processor.py: what it reads from the system."""

from __future__ import annotations

import os

import pytest

from attention_ext import processor


@pytest.mark.parametrize(
    "limit, expected",
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        (None, 8),
    ],
)
def test_cores_are_those_of_the_process_and_of_its_share_of_time(monkeypatch, tmp_path, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(processor, "QUOTA", tmp_path / "cpu.max")
    if limit:
        processor.QUOTA.write_text(f"{limit}\n")
    assert processor.cores() == expected
