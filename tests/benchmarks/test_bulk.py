"""benchmarks/bulk.py, many texts by the number of processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.full


def test_each_number_of_processes_has_a_row(extension):
    sizes = ["--shard-size", "2", "--shards", "1", "--rounds", "1", "-m", "shakes128"]
    command = [sys.executable, str(ROOT / "benchmarks" / "bulk.py"), "--workers", "1,2", *sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[0][:2] == ["workers", "tokens/s"]
    assert [row[0] for row in rows[1:]] == ["1 processes", "2 processes"] and rows[1][3] == "1.00"
    assert all(float(row[1].replace(",", "")) > 0 and 0 < float(row[6]) <= 1.1 for row in rows[1:])
