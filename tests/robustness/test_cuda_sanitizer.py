"""compute-sanitizer watches every CUDA kernel: bad accesses, races in shared memory, wrong barriers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    done = subprocess.run(
        [
            sanitizer,
            *("--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=attention_"),
            *(("--report-api-errors", "no") if tool == "memcheck" else ()),  # kernels.py checks every call
            *(sys.executable, str(Path(__file__).with_name("cuda_cases.py"))),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    calls = re.search(r"(\d+) calls", done.stdout)
    assert calls and int(calls[1]) > 20
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout
