"""The inputs and the expected rows of attention over processes."""

from __future__ import annotations

import oracle
import pytest
import torch

from shakespeare.attention_ext import layout
from shakespeare.lab import parallel
from shakespeare.lab.parallel import Question


def question(method: str, **changed) -> Question:
    settings = dict(N=4096, queries=4096, heads=2, d=8, causal=True, part="part4", device="cpu", timeout=30.0)
    return Question(method, **(settings | changed))


@pytest.mark.parametrize("causal", [False, True])
def test_the_rows_compared_with_float64_are_those_of_the_sequence(causal):
    asked = question("zigzag", N=5000, queries=50, causal=causal)
    queries, keys = parallel.layout(asked, 3)
    k, v = (parallel.rows_of(name, asked, [range(5000)]) for name in "kv")
    q = parallel.rows_of("q", asked, [range(50)])
    expected, _ = oracle.attention(q, k, v, causal, asked.scale)
    for rank in range(3):
        assert torch.equal(parallel.rows_of("k", asked, keys[rank]), layout.take(k, keys[rank]))
        which, got = parallel.exact(asked, queries[rank])
        assert len(which) == min(parallel.CHECKED, layout.length(queries[rank]))
        torch.testing.assert_close(got, layout.take(expected, queries[rank])[:, :, which])
