"""Rounding to int8 weights and whole activations, against whole numbers of Python."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import tiny
import torch

from shakespeare.model import rounding


def numbers(shape, seed, spread=3):
    """Numbers whose rows differ in size by many powers of 2."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-spread, spread + 1, (shape[0], 1), generator=generator).float())
    return torch.randn(shape, generator=generator) * sizes


@pytest.mark.parametrize("inputs", [1, 129, 300])
def test_weights_are_whole_multiples_of_a_scale_for_each_group(inputs):
    weight = numbers((5, inputs), seed=inputs)
    weight[2] = 0
    rounded = rounding.round_weights(weight)
    assert rounded.shape == weight.shape
    for row, made in zip(weight.tolist(), rounded.tolist()):
        for start in range(0, inputs, rounding.GROUP):
            group, got = row[start : start + rounding.GROUP], made[start : start + rounding.GROUP]
            scale = Fraction(max(map(abs, group))) / 127
            for exact, value in zip(map(Fraction, group), map(Fraction, got)):
                assert abs(value - exact) <= scale * Fraction(501, 1000)
                whole = value / scale if scale else Fraction(0)
                assert abs(whole - round(whole)) < Fraction(1, 10000) and abs(round(whole)) <= 127


@pytest.mark.parametrize("width", [1, 2, 37, 200])
def test_activations_are_the_nearest_multiples_of_a_power_of_2(width):
    x = numbers((40, width), seed=width, spread=100)
    x[1] = 0
    x[2], x[2, 0] = 0, 2.0 - 2.0**-23  # is rounded up to 2
    rounded = rounding.round_activations(x)
    for row, made in zip(x.tolist(), rounded.tolist()):
        largest = max(abs(number) for number in made)
        if largest == 0:
            assert not any(row)
            continue
        # The scale is not given: it is that of the largest, unless that was rounded up to a power of 2.
        exponent = max(math.frexp(largest)[1] - 1, rounding.LEAST_EXPONENT)
        scale = Fraction(2) ** (exponent - (rounding.BITS - 2))
        for exact, value in zip(map(Fraction, row), map(Fraction, made)):
            assert value == round(exact / scale) * scale  # of two nearest, the even one
            assert abs(value / scale) < 2 ** (rounding.BITS - 1)


def test_the_embeddings_stay_as_they_are():
    gpt = tiny.gpt(bias=True)
    made = rounding.in_int8(gpt)
    assert made.transformer.wte.weight.data_ptr() == gpt.transformer.wte.weight.data_ptr()
    assert not torch.equal(made.lm_head.weight, gpt.lm_head.weight)
    assert torch.equal(made.transformer.h[0].mlp.c_fc.bias, gpt.transformer.h[0].mlp.c_fc.bias)
    linear = [m for m in gpt.modules() if isinstance(m, torch.nn.Linear)]
    assert len([m for m in made.modules() if isinstance(m, rounding.Int8Linear)]) == len(linear)
