"""The server's benchmarks run, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.full

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")
if not hasattr(os, "sched_getaffinity"):
    pytest.skip("processes cannot be pinned to cores here", allow_module_level=True)


def printed(name: str, *arguments: str) -> str:
    """What a benchmark prints; it runs in a process of its own, because it pins itself to a core."""
    command = [sys.executable, ROOT / "benchmarks" / name, "-m", "shakes128", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_speed_relative_to_the_engine(extension):
    shown = printed("serving.py", "--rounds", "1", "--streams", "3", "--tokens", "12")
    figures = r"[\d,]+ \| \d+% \| \d+% \| 1\.00 \(1\.00\) \| \d+%"
    rows = re.findall(rf"^\| gpt\.py serve \| (\d+) \| {figures} \|$", shown, re.M)
    assert rows == ["3", "1"], shown
    assert re.search(r"median [\d.]+ ms, 99th of 100 [\d.]+ ms", shown)
