"""The server among clients that behave badly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

pytestmark = pytest.mark.full

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

REQUESTS = (10_000, 300)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_nothing_is_lost_or_wrong_or_left_behind(extension, full):
    requests = REQUESTS[0 if full else 1]
    command = [sys.executable, ROOT / "tests/robustness/soak_server.py", "--requests", str(requests)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{requests} requests in " in done.stdout and ", 0 lost or wrong" in done.stdout
