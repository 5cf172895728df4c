"""benchmarks/scores.py, the time of attention by the size of the scores."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.full


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "scores.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_contender_has_a_time_and_a_ratio_for_each_scale(extension):
    done = run("--parts", "part0,part4", "-N", "64", "-d", "16", "--rounds", "3", "--limit", "1000")
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["contender", "part0", "part4", "sdpa"]
    assert rows[0][-1] == "denormal"
    assert {len(row) for row in rows} == {len(rows[0])}
    assert all(float(figure) > 0 for row in rows[1:] for figure in row[2:])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--parts", "part9"), "parts has 'part9'; it must hold names of part0, part1,"),
        (("--simd", "avx"), "simd has 'avx'; it must hold names of auto, ispc, portable, off"),
    ],
)
def test_a_wrong_argument_is_named(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr
