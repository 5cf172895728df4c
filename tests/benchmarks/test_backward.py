"""benchmarks/backward.py, part4's backward pass beside SDPA's."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.full


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "backward.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_case_has_a_row(extension):
    done = run("-N", "9,70", "--threads", "1,2", "--mask", "none,causal", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    sizes = [f"(1, 4, {N}, 32)" for N in (9, 70)] + ["(16, 4, 128, 32)"]
    cases = [[size, mask, count] for count in "12" for mask in ("none", "causal") for size in sizes]
    assert rows[0][:3] == ["(B, H, N, d)", "mask", "threads"] and [row[:3] for row in rows[1:]] == cases
    for row in rows[1:]:
        assert all(float(figure.rstrip("%")) >= 0 for figure in row[3:])


def test_a_wrong_mask_is_named():
    done = run("--mask", "window")
    assert done.returncode == 2 and "--mask is window; it must have none or causal" in done.stderr
