"""The loss on held-out text: wrong arguments are named, and precisions differ."""

from __future__ import annotations

import re

import pytest

from attention_ext.parts import Precision
from lab import loss

TEXT = "First Citizen:\nWe are accounted poor citizens.\n" * 60


def test_an_unknown_precision_is_named():
    message = re.escape(f"weights is 'int4'; it must be one of {', '.join(Precision)}")
    with pytest.raises(ValueError, match=message):
        loss.held_out("shakes128", TEXT, weights="int4")


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_rounding_changes_the_loss_a_little(weights):
    exact, rounded = (loss.held_out("shakes128", TEXT, weights=w).nats for w in (Precision.FP32, weights))
    assert exact != rounded and exact == pytest.approx(rounded, abs=0.01)
