"""benchmarks/web.py, the page against the native engine compiled for SSE."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys

import pytest
from node_process import WEB_TESTS
from support import ROOT

pytestmark = pytest.mark.full


def test_it_prints_both_engines_and_both_lines(extension, tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("SSE is of x86-64")
    for program in ("chromium", "node"):
        if not shutil.which(program):
            pytest.skip(f"{program} is missing")
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is missing")
    if not (WEB_TESTS / "node_modules" / "playwright-core").is_dir():
        pytest.skip("playwright-core is missing: npm install --prefix tests/web")
    script = str(ROOT / "benchmarks" / "web.py")
    command = [sys.executable, script, "-m", "shakes128", "--rounds", "2", "--out", str(tmp_path / "page")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| (page|native engine, \S+) \| ([\d,]+) \|", done.stdout, re.M))
    assert set(rows) == {"page", "native engine, x86-64-v2"}
    assert all(int(speed.replace(",", "")) > 0 for speed in rows.values())
    fast, slow = re.findall(r"ms \| [\d,]+ \| ([\d.]+) s \| ([\d.]+) s \|", done.stdout)
    for alone, first in (fast, slow):
        assert 0 < float(alone) < float(first)
    assert float(fast[1]) < float(slow[1]) and "shakes128, fp32, texts of 127 tokens" in done.stdout
