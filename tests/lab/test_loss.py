"""The loss on held-out text: wrong arguments are named, and precisions differ."""

from __future__ import annotations

import re

import pytest

from attention_ext.parts import CachePrecision, Precision
from lab import loss

TEXT = "First Citizen:\nWe are accounted poor citizens.\n" * 60


def test_an_unknown_precision_is_named():
    message = re.escape(f"weights is 'int4'; it must be one of {', '.join(Precision)}")
    with pytest.raises(ValueError, match=message):
        loss.held_out("shakes128", TEXT, weights="int4")


def test_an_unknown_precision_of_the_cache_is_named():
    message = re.escape(f"kv_cache is 'int4'; it must be one of {', '.join(CachePrecision)}")
    with pytest.raises(ValueError, match=message):
        loss.held_out("shakes128", TEXT, kv_cache="int4")


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_a_bf16_cache_changes_the_loss_a_little(extension, part):
    exact, rounded = (
        loss.held_out("shakes128", TEXT, part, kv_cache=each).nats for each in (CachePrecision.FP32, "bf16")
    )
    assert exact != rounded and exact == pytest.approx(rounded, abs=0.01)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_rounding_changes_the_loss_a_little(weights):
    exact, rounded = (loss.held_out("shakes128", TEXT, weights=w).nats for w in (Precision.FP32, weights))
    assert exact != rounded and exact == pytest.approx(rounded, abs=0.01)
