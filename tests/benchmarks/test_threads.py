"""benchmarks/threads.py, writing by the number of threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.full


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "threads.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_number_of_threads_has_a_row(extension):
    done = run("--threads", "1,3", "--texts", "7", "--rounds", "2", "--weights", "bf16", "--kv-cache", "bf16")
    assert "weights in bf16, cache in bf16" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[0][:2] == ["threads", "tokens/s"] and [row[0] for row in rows[1:]] == ["1", "3"]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows[1:]) and float(rows[1][3]) == 1


def test_a_wrong_number_of_threads_is_named():
    done = run("--threads", "0")
    assert done.returncode == 2 and "--threads" in done.stderr and "at least 1" in done.stderr
