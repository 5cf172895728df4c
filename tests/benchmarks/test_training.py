"""benchmarks/training.py, the native training step beside PyTorch's."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.full


def test_each_case_has_a_row(extension):
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py")]
    command += ["--threads", "1,2", "--batch", "1,3", "--block-size", "5", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    cases = [[f"{batch} x 5", threads] for threads in "12" for batch in (1, 3)]
    assert rows[0][:2] == ["batch", "threads"] and [row[:2] for row in rows[1:]] == cases
    for row in rows[1:]:
        pytorchs, native, ratio = map(float, row[2:5])
        assert abs(ratio - pytorchs / native) <= 0.2 * ratio + 0.01 and float(row[5]) <= 1e-4
