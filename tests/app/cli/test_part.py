"""The lab's test of a part, and the command 4Daccess."""

import re

import pytest

from shakespeare.attention_ext import PARTS
from shakespeare.lab import backward, correctness


def test_the_labs_test(cli, part):
    done = cli(part, "-N", 128, "-br", 32, "-bc", 64, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "manual attention == pytorch attention True" in done.stdout
    assert f"REFERENCE - {PARTS[part].title} statistics" in done.stdout
    assert f"{part.upper()} - {PARTS[part].title} statistics" in done.stdout
    assert done.stderr == ""


def test_a_mismatch_exits_1(cli, extension, monkeypatch):
    right = correctness.attention
    monkeypatch.setattr(
        correctness, "attention", lambda part, *t, **k: right(part, *t, **k) + (part == "part4")
    )
    done = cli("part4", "-N", 32)
    assert done.returncode == 1
    assert "manual attention == pytorch attention False" in done.stdout
    assert "4096 of 4096 elements are off" in done.stdout


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_the_gradients(cli, extension, part):
    sizes = ("-N", 70, "-B", 2, "--heads", 3, "-d", 16)
    done = cli(part, "--backward", *sizes, "--causal", "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "manual gradients == float64 gradients True" in done.stdout
    assert "speed-up over SDPA:" in done.stdout


def test_wrong_gradients_exit_1(cli, extension, monkeypatch):
    right = backward.attention
    monkeypatch.setattr(backward, "attention", lambda part, *t, **k: 1.01 * right(part, *t, **k))
    done = cli("part4", "--backward", "-N", 40)
    assert done.returncode == 1 and "manual gradients == float64 gradients False" in done.stdout


def test_4d_access(cli, extension):
    done = cli("4Daccess")
    assert done.returncode == 0
    assert done.stdout.startswith("Tensor Shape: (2, 4, 16, 32)\n")
    values = dict(re.findall(r"^(Expected|Result): +(\S+)$", done.stdout, re.M))
    assert values["Expected"] == values["Result"]
    assert re.search(r"^4D Tensor Index: \(\d, \d, \d+, \d+\)$", done.stdout, re.M)
