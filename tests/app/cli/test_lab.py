"""The lab's test of a part, and the command 4Daccess."""

from __future__ import annotations

import re

import pytest
import torch

import attention_ext
from attention_ext import PARTS
from lab import backward, correctness


def test_the_labs_test(cli, part):
    done = cli(part, "-N", 128, "-br", 32, "-bc", 64, "--threads", 1)
    assert done.returncode == 0, done.stderr
    assert "manual attention == pytorch attention True" in done.stdout
    assert f"REFERENCE - {PARTS[part].title} statistics" in done.stdout
    assert f"{part.upper()} - {PARTS[part].title} statistics" in done.stdout
    assert done.stderr == ""


def test_a_mismatch_exits_1(cli, extension, monkeypatch):
    right = correctness.attention
    monkeypatch.setattr(correctness, "attention", lambda part, **k: right(part, **k) + (part == "part4"))
    done = cli("part4", "-N", 32)
    assert done.returncode == 1
    assert "manual attention == pytorch attention False" in done.stdout
    assert "4096 of 4096 elements are off" in done.stdout


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_the_gradients(cli, extension, part):
    sizes = ("-N", 70, "-B", 2, "--heads", 3, "-d", 16)
    done = cli(part, "--backward", *sizes, "--causal", "--threads", 1, "--simd", "off")
    assert done.returncode == 0, done.stderr
    assert "manual gradients == float64 gradients True" in done.stdout
    assert ("off (plain loops)" in done.stdout) == (part == "part4")
    assert "speed-up over SDPA:" in done.stdout


def test_wrong_gradients_exit_1(cli, extension, monkeypatch):
    right = backward.attention
    monkeypatch.setattr(backward, "attention", lambda part, *t, **k: 1.01 * right(part, *t, **k))
    done = cli("part4", "--backward", "-N", 40)
    assert done.returncode == 1 and "manual gradients == float64 gradients False" in done.stdout


def test_4d_access(cli, extension):
    done = cli("4Daccess")
    assert done.returncode == 0
    values = dict(re.findall(r"^(Expected|Result): +(\S+)$", done.stdout, re.M))
    assert values["Expected"] == values["Result"]
    assert re.search(r"^4D Tensor Index: \(\d, \d, \d+, \d+\)$", done.stdout, re.M)


def test_the_tests_options_reach_the_kernels(cli, extension, monkeypatch):
    calls = []

    def recorded(part, *tensors, **options):
        calls.append((part, options["br"], options["bc"], options["causal"], torch.get_num_threads()))
        return right(part, *tensors, **options)

    right = attention_ext.attention
    monkeypatch.setattr(correctness, "attention", recorded)
    assert cli("part3", "-N", 32, "-br", 5, "-bc", 7, "--causal", "--threads", 1).returncode == 0
    assert set(calls) == {("part0", 5, 7, True, 1), ("part3", 5, 7, True, 1)}
    calls.clear()
    assert cli("part4", "-N", 32, "--threads", 2).returncode == 0
    assert set(calls) == {("part0", 256, 256, False, 2), ("part4", 256, 256, False, 2)}
    calls.clear()
    assert cli("part4", "-N", 32, "--threads", 1, "--br", "auto", "-bc", "auto").returncode == 0
    assert set(calls) == {("part0", None, None, False, 1), ("part4", None, None, False, 1)}


def test_the_test_in_bf16(cli, extension, part):
    done = cli(part, "-N", 100, "--dtype", "bf16", "--threads", 1)
    if part in ("part0", "part4"):
        assert done.returncode == 0 and "manual attention == pytorch attention True" in done.stdout
    else:
        assert done.returncode == 2
        assert done.stderr.startswith(f"gpt.py: error: dtype is 'bf16'; {part} does not take it")


def test_the_tests_shape(cli, extension, monkeypatch):
    shapes = []

    def recorded(part, q, k, v, **options):
        shapes.append((part, tuple(q.shape)))
        return right(part, q, k, v, **options)

    right = attention_ext.attention
    monkeypatch.setattr(correctness, "attention", recorded)
    assert cli("part4", "-N", 32, "-B", 3, "--heads", 2, "-d", 16, "--threads", 1).returncode == 0
    assert set(shapes) == {("part0", (3, 2, 32, 16)), ("part4", (3, 2, 32, 16))}


def test_a_small_mismatch_in_bf16_is_one(cli, extension, monkeypatch):
    right = correctness.attention
    monkeypatch.setattr(
        correctness, "attention", lambda part, **k: right(part, **k) * (1 + (part == "part4") / 32)
    )
    assert cli("part4", "-N", 64, "--dtype", "bf16").returncode == 1
