"""benchmarks/attention.py, a preset of gpt.py bench against other engines."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

from attention_ext import PARTS, processor
from benchmarks import attention
from lab import saved

pytestmark = pytest.mark.full


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


def test_the_preset_in_bf16():
    _, contenders, *rest = attention.arguments(["--dtype", "bf16", "--save"])
    assert contenders == "part0,part4,sdpa"
    assert str(saved.RESULTS / f"attention_bf16-{processor.slug()}.json") in rest


def test_save_alone_means_a_file_of_its_own():
    """The file of bench holds the cases of the README."""
    file = str(saved.RESULTS / f"attention-{processor.slug()}.json")
    for given in (["part4", "--save"], ["part4", "--save", "-N", "64"]):
        at = given.index("--save") + 1
        assert attention.with_file(given) == [*given[:at], file, *given[at:]]
    for given in (["part4", "--save", "x.json"], ["part4", "--save=x.json"], ["part4", "-N", "64"]):
        assert attention.with_file(given) == given
