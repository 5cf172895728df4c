"""gpt.py try FILE.h: right changes of scores are right, and mistakes are named."""

import json
import signal

import pytest
import torch
from support import full

from shakespeare.attention_ext import reference
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge import cases, score_mod, tolerance
from shakespeare.judge.cases import CASES, Case
from shakespeare.judge.speed import Size

LEAKY = """
float score(float s, At) { return s > 0 ? s : s / 10; }
float slope(float s, At) { return s > 0 ? 1 : 0.1f; }
"""
RIGHT = {
    "seen": "bool seen(At at) { return at.j % 3; }\nfloat score(float s, At at) { return s + at.h; }",
    "kink": LEAKY,
    "cube": "float score(float s, At) { return s * s * s; }\nfloat slope(float s, At) { return 3 * s * s; }",
}
WRONG = {
    "float score(float s, At) { return s * s; }\nfloat slope(float s, At) { return s; }": "differences",
    "float score(float s, At) { return s; }\nfloat slope(float, At at) { return at.j; }": "slope(",
    "float score(float s, At) { static int n = 0; return s + n++ % 7; }": "depend on s and at alone",
    "float score(float s, At at) { return at.i == at.j ? 1 / 0.0f : s; }": "At{0, 0, 0, 0}) is inf",
    "#include <cmath>\nfloat score(float s, At at) { return at.b ? NAN : s; }": "At{1, 0, 0, 0}) is nan",
}
ENDED = (
    ("return *(volatile float*)8;", "segmentation fault"),
    full("std::exit(0);", "it was not tried"),
    full("for (volatile float x = s;; x = s) (void)x;", "did not end in time"),
)


@pytest.fixture
def tried(extension, tmp_path):
    def call(text: str) -> dict:
        (tmp_path / "mine.h").write_text(text)
        found = score_mod.tried(tmp_path / "mine.h", Size(N=64, d=8, heads=2), 600, 0)
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # its signal would end this process
        return found

    return call


def test_right_headers_are_right(tried):
    for name, text in RIGHT.items():
        found = tried(text)
        assert found["wrong"] == "" and found["slope"] == (name != "seen"), (name, found)
        assert list(found["ms"]) == ["part1", "part2", "part3", "part4", "without"]


@pytest.mark.parametrize("some", [0, full(1)])
def test_mistakes_are_named(tried, some):
    for text, why in [*WRONG.items()][some::2]:
        found = tried(text)
        assert why in found["wrong"] and found["at"] and "ms" not in found, (text, found)


def test_a_part_that_differs_is_named(tried, monkeypatch):
    right = score_mod.attention
    wrong = lambda part, *t, **o: right(part, *t, **o) + 0.01 * (part == "part3")  # noqa: E731
    monkeypatch.setattr(score_mod, "attention", wrong)
    assert tried(RIGHT["seen"])["wrong"] == "part3's output differs from the definition's"


def test_rounding_to_16_bits_is_allowed_and_a_missing_term_is_not():
    """D comes from an output of 16 bits: where few keys have all weight, dS = P (dP - D) is its rounding."""
    case = Case(1, 1, 160, 160, 64, causal=True, scores="growing", dtype=Dtype.BF16)
    tensors = q, k, v = [torch.from_numpy(t) for t in cases.inputs(case)]
    s = case.applied * q @ k.mT
    terms = score_mod.summed(case, s, torch.ones_like(s), *tensors)
    q, k, v = (t.double() for t in tensors)
    p = (case.applied * q @ k.mT).masked_fill(~reference.seen(160, 160, q.device), -torch.inf).softmax(-1)
    dP = v.sum(-1)[:, :, None]
    right, rounded, without = (
        (case.applied * p * (dP - D) @ k).numpy()
        for D in ((p * dP).sum(-1, True), (p @ v).bfloat16().double().sum(-1, True), 0)
    )
    expected = tolerance.beside(right, right, 1e-6, case.dtype, terms[0].numpy())
    assert expected.allows(rounded) and not expected.allows(without)
    assert not tolerance.beside(right, right, 1e-6, case.dtype).allows(rounded)


@pytest.mark.parametrize("body, why", ENDED)
def test_what_ends_the_process_is_named(cli, extension, tmp_path, body, why):
    (tmp_path / "mine.h").write_text(f"#include <cstdlib>\nfloat score(float s, At) {{ {body} }}")
    found = json.loads(cli("try", "mine.h", "--seconds", 5, "--json", code=1).stdout)
    assert not found["right"] and why in found["wrong"], found


def test_the_command(cli, failed, extension, tmp_path):
    file = tmp_path / "mine.h"
    file.write_text(RIGHT["kink"])
    done = cli("try", file, "-N", 64, "--causal")
    assert f"mine.h is right in {len(CASES)} cases" in done.stdout and "part4 takes" in done.stdout
    file.write_text("float score(float s) { return s; }")
    assert "too many arguments" in cli("try", file, code=1).stdout
    assert "--backward does not go with a header" in failed("try", file, "--backward")
    assert "--dtype goes with --device cuda only" in failed("try", file, "--dtype", "bf16")
    (tmp_path / "mine.cpp").touch()
    assert "--device goes with a header" in failed("try", tmp_path / "mine.cpp", "--device", "cuda")


def test_it_is_tried_on_a_gpu(cli, failed, extension, tmp_path):
    file = tmp_path / "mine.h"
    file.write_text(RIGHT["kink"])
    if not torch.cuda.is_available():
        assert "device is 'cuda', and " in failed("try", file, "--device", "cuda")
        pytest.skip("no GPU")
    for dtype in Dtype:
        done = cli("try", file, "-N", 64, "--device", "cuda", "--dtype", dtype)
        assert "in part4 on CUDA" in done.stdout and "part4 takes" in done.stdout
    file.write_text(next(iter(WRONG)))
    assert "differences" in cli("try", file, "--device", "cuda", code=1).stdout


def test_cases_on_a_gpu_have_one_width():
    every = score_mod.cases_on("cuda", 3, Dtype.BF16)
    assert {(case.d, case.seed, case.dtype) for case in every} == {(score_mod.WIDTH, 3, Dtype.BF16)}
    assert len(every) == len({*every}) > 20
