"""Which of a wheel's libraries is loaded."""

from __future__ import annotations

import pytest

from attention_ext import processor
from attention_ext.build import prebuilt


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A wheel with libraries for x86-64, but not for AVX-512 without VNNI."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt.sys, "platform", "linux")
    monkeypatch.delenv(prebuilt.COMPILE, raising=False)
    for level in ("x86_64", "x86_64_v3", "x86_64_v4+avx512vnni"):
        (tmp_path / f"decoder-{level}.so").touch()


def test_the_best_library_that_the_processor_can_run_is_taken(wheel, monkeypatch):
    v3, v4 = prebuilt.V3, prebuilt.V4
    for features, level in (
        (set(), "x86_64"),
        (v3 - {"fma"}, "x86_64"),
        (v3 | {"sse4_2"}, "x86_64_v3"),
        (v4, "x86_64_v3"),  # its own is missing
        (v4 | {"avx512_vnni"}, "x86_64_v4+avx512vnni"),
    ):
        monkeypatch.setattr(processor, "features", lambda: features)
        assert prebuilt.level("decoder") == level
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "riscv64")
    assert prebuilt.find("decoder") is None


def test_nothing_is_taken_where_it_is_to_be_compiled(wheel, monkeypatch, tmp_path):
    assert prebuilt.find("decoder") is not None and prebuilt.find("operators") is None
    monkeypatch.setenv(prebuilt.COMPILE, "1")
    assert prebuilt.level("decoder") == "this processor"
    monkeypatch.delenv(prebuilt.COMPILE)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "none")
    assert prebuilt.find("decoder") is None
