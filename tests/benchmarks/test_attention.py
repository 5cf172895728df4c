"""benchmarks/attention.py, a preset of gpt.py bench against other engines."""

from __future__ import annotations

import subprocess
import sys

from support import ROOT

from attention_ext import PARTS


def test_the_preset_is_bench(tmp_path):
    """The preset passes its arguments on. If an option is given twice, the last one counts."""
    script = ROOT / "benchmarks" / "attention.py"
    command = [sys.executable, str(script)]
    given = [*command, "part4,sdpa", "-N", "64", "--dry-run"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 cells, 15 rounds each\n")
    everything = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, cwd=tmp_path)
    assert all(f"\n{name}, " in everything.stdout for name in [*PARTS, "sdpa"])
