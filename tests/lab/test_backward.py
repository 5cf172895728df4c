"""The lab's test of gradients: it passes for right ones, detects wrong ones, and counts operations."""

import re

import pytest

from shakespeare.attention_ext import attention
from shakespeare.lab import backward
from shakespeare.lab.backward import Shape


def lines_of(part, shape, **settings):
    lines: list[str] = []
    passed = backward.run(part, shape, echo=lines.append, rounds=1, **settings)
    return passed, "\n".join(lines)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("part", ["part0", "part4"])
def test_right_gradients_pass(extension, part, causal):
    passed, text = lines_of(part, Shape(2, 3, 90, 24, causal))
    assert passed and "manual gradients == float64 gradients True" in text
    assert len(re.findall(r"^d[qkv]: largest error \S+, PyTorch's \S+, allowed \S+$", text, re.M)) == 3
    assert re.search(rf"^{part} backward time:  \S+ms, \S+ GFLOP/s, \d+% of the FMA peak$", text, re.M)
    assert re.search(r"^speed-up over SDPA:  \S+x$", text, re.M)


def test_a_wrong_gradient_is_caught(extension, monkeypatch):
    """The output stays the same; a thousandth of one gradient is missing."""
    for which in range(3):

        def wrong(part, *tensors, which=which, **options):
            tensors = list(tensors)
            tensors[which] = tensors[which].detach() * 1e-3 + tensors[which] * (1 - 1e-3)
            return attention(part, *tensors, **options)

        monkeypatch.setattr(backward, "attention", wrong)
        passed, text = lines_of("part4", Shape(1, 2, 64, 16, True))
        assert not passed and text.endswith("manual gradients == float64 gradients False\n"), "qkv"[which]


def test_a_part_without_a_gradient_is_named():
    with pytest.raises(ValueError, match="part is 'part2'; it must be one with a gradient: part0, part4"):
        backward.run("part2", Shape(1, 1, 8, 8, False))
