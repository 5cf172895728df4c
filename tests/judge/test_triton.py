"""A user's file in Triton: interpreted without a GPU and compiled for one; its tiles and its mistakes."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from planted import STARTS
from support import naming

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge import triton_tiles, verdict
from shakespeare.judge.cases import CASES
from shakespeare.judge.diagnosis import Finding
from shakespeare.judge.speed import Size
from shakespeare.lab.cuda.architectures import SHEETS

SECONDS = 600  # after which a call is endless
MOST_WORK = 10**6  # multiply-adds of a case with a mistake
START, BACKWARD = ((STARTS / f"start_triton{name}.py").read_text() for name in ("", "_backward"))
MISTAKES = (  # old, new, the kind of the finding that names it; the last one in the backward pass
    ("Oi = correction[:, None] * Oi", "Oi = Oi", "rescale"),
    ("rows[:, None] * strides[2]", "rows[:, None] * d", "strides"),
    ("i[:, None] + (Nk - Nq)", "i[:, None]", "offset"),
    ("Sij = scale *", "Sij = scale * (2.0 if BLOCK_M == 128 else 1.0) *", ""),  # in one tile, not named
    ("dSij = scale *", "dSij =", "scale"),
)
with_triton = pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")


@with_triton
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["start_triton.py", "start_triton_backward.py"])
def test_the_starts_compile_without_a_gpu(name, arch):
    backward = "backward" in name
    size = Size(N=128, d=16, backward=backward, dtype=Dtype.FP32 if backward else Dtype.BF16)
    found = triton_tiles.swept(STARTS / name, size, arch=arch)
    (listed,) = (line for line in (STARTS / name).read_text().splitlines() if line.startswith("TILES"))
    assert isinstance(found, list) and len(found) == listed.count("("), found
    for row in found:
        assert row["registers"] > 0 and 0 < row["shared"] <= SHEETS[arch].shared and row["fits"]
        assert (row["ms"] is not None) == user_kernel.has_gpu() and {*row["sizes"]} == {"BLOCK_M", "BLOCK_N"}


@with_triton
def test_what_the_interpreter_takes_and_a_gpu_does_not(tmp_path):
    file, begin, end = tmp_path / "mine.py", START.index("TILES = ["), START.index("\nCONFIGS")
    file.write_text(f"{START[:begin]}TILES = [(16, 16, 4, 1), (16, 64, 4, 8)]{START[end:]}")
    found = triton_tiles.swept(file, Size(N=128, d=128))
    assert isinstance(found, list) and [row["fits"] for row in found] == [True, False], found
    file.write_text(START.replace("max(16,", "max(8,"))
    found = triton_tiles.swept(file, Size(N=128, d=8))
    line = START[: START.index("tl.dot(Qi")].count("\n") + 1
    assert isinstance(found, Finding) and found.kind == "compile"
    assert found.sentence.endswith(f"K >= 16 at mine.py:{line}"), found


@with_triton
def test_mistakes_are_found(tried, monkeypatch):
    small = [case for case in CASES if case.work < MOST_WORK]
    monkeypatch.setattr(verdict.cases, "seeded", lambda *asked: [replace(c, dtype=asked[2]) for c in small])
    for old, new, kind in MISTAKES:
        backward = old not in START
        with naming(new):
            text = (BACKWARD if backward else START).replace(old, new)
            found = tried("mine.py", text, backward=backward)
            assert found.wrong and (found.finding.kind if found.finding else "") == kind, found
    assert tried("mine.py", START, dtype=Dtype.FP16).right


def test_without_triton_a_sentence_says_so(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(START)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(user_kernel.BuildError, match=r"triton, which is not installed: pip install"):
        user_kernel.loaded(tmp_path / "mine.py")


@with_triton
def test_the_command(cli, failed):
    assert "--triton goes with --new FILE.py only" in failed("try", "--new", "mine.cpp", "--triton")
    cli("try", "--new", "mine.py", "--triton")
    done = cli("try", "mine.py", "-N", 64, "-d", 16, "--heads", 1, "--seconds", SECONDS, "--json")
    found = json.loads(done.stdout)
    assert found["right"] and found["tried"] == len(CASES) and found["tiles"], found
    if not user_kernel.has_gpu():
        assert found["simulated"] == "triton" and "Triton's interpreter" in found["speed"]["note"]
