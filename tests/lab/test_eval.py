"""The loss on held-out text: wrong arguments are named, and precisions differ."""

import pytest
from support import naming

from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.lab.eval import held_out_loss

TEXT = "First Citizen:\nWe are accounted poor citizens.\n" * 60


def test_an_unknown_precision_is_named():
    for name, kinds in (("weights", Precision), ("kv_cache", CachePrecision)):
        message = f"{name} is 'int4'; it must be one of {', '.join(kinds)}"
        with naming(name), pytest.raises(ValueError, match=message):
            held_out_loss("shakes128", TEXT, **{name: "int4"})


def test_rounding_changes_the_loss_a_little(extension):
    for part in ("part0", "part4"):
        exact = held_out_loss("shakes128", TEXT, part).nats
        for change in ({"weights": "bf16"}, {"weights": "int8"}, {"kv_cache": "bf16"}):
            with naming(part, change):
                rounded = held_out_loss("shakes128", TEXT, part, **change).nats
                assert exact != rounded and exact == pytest.approx(rounded, abs=0.01)
