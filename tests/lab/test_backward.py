"""The lab's test of gradients: it passes for right ones, detects wrong ones, and counts operations."""

from __future__ import annotations

import re

import pytest
import torch

from attention_ext import attention
from lab import backward
from lab.backward import Shape


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


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_wrong_gradient_is_caught(extension, monkeypatch, which):
    """The output stays the same; a thousandth of one gradient is missing."""

    def wrong(part, q, k, v, **options):
        tensors = dict(q=q, k=k, v=v)
        t = tensors[which]
        tensors[which] = t.detach() * 1e-3 + t * (1 - 1e-3)
        return attention(part, *tensors.values(), **options)

    monkeypatch.setattr(backward, "attention", wrong)
    passed, text = lines_of("part4", Shape(1, 2, 64, 16, True))
    assert not passed and text.endswith("manual gradients == float64 gradients False\n")


def test_operations_are_five_products_of_the_visible_scores():
    q, k = torch.ones(10, 1), torch.ones(10, 1)
    scores = q @ k.mT
    assert Shape(2, 3, 10, 7, False).operations == 5 * 2 * 7 * 6 * scores.sum()
    assert Shape(2, 3, 10, 7, True).operations == 5 * 2 * 7 * 6 * scores.tril().sum()


def test_a_part_without_a_gradient_is_named():
    with pytest.raises(ValueError, match="part is 'part2'; it must be one with a gradient: part0, part4"):
        backward.run("part2", Shape(1, 1, 8, 8, False))
