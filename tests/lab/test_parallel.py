"""The prediction for attention over processes, and its inputs."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from shakespeare.attention_ext import layout
from shakespeare.lab import parallel
from shakespeare.lab.parallel import Question, Speeds


def question(method: str, **changed) -> Question:
    settings = dict(N=4096, queries=4096, heads=2, d=8, causal=True, part="part4", device="cpu", timeout=30.0)
    return Question(method, **(settings | changed))


def predicted(asked: Question, P: int, **changed) -> tuple[float, float, float]:
    settings = dict(work=1e9, bandwidth=math.inf, latency=0.0, crowd=1.0)
    return parallel.predict(asked, *parallel.layout(asked, P), Speeds(**(settings | changed)))


@pytest.mark.parametrize("P", [1, 2, 4, 8, 16])
def test_a_causal_ring_reaches_what_its_bound_says_and_zigzag_all(P):
    ideal = 2 * (4096 * 4097 // 2) / 1e9 / P
    assert ideal / predicted(question("ring"), P)[0] == pytest.approx(P / 2 / (P - 0.5), rel=5e-3)
    for method in ("zigzag", "ulysses") if P <= 2 else ("zigzag",):
        assert ideal / predicted(question(method), P)[0] == pytest.approx(1, rel=5e-3)


def test_a_ring_hides_what_it_sends_and_gather_does_not():
    """Each of three exchanges takes 1/4 s of 8 * 2 heads * 1024 rows * d 8, a block's arithmetic 1 s."""
    speeds = dict(bandwidth=8 * 2 * 1024 * 8 * 4, work=2 * 1024 * 1024)
    ring = predicted(question("ring", causal=False), 4, **speeds)
    assert ring == pytest.approx((4, 4, 0.75))
    gather = predicted(question("gather", causal=False), 4, **speeds)
    assert gather == pytest.approx((4.75, 4, 0.75))
    slow = predicted(question("ring", causal=False), 4, **speeds | {"work": 1e12})
    assert slow[0] == pytest.approx(0.75, rel=1e-3)


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
