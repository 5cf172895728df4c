"""Properties of attention that hold for any numbers, in every part and SIMD helper, against float64.

Each example runs through all of them. A result may differ from the exact one as oracle.assert_close allows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_ext import PARTS, SIMD, BuildError, attention
from attention_ext.extension import load
from attention_ext.reference import merge
from robustness.conftest import FULL

pytestmark = pytest.mark.full

EXAMPLES = settings(max_examples=300 if FULL else 15, deadline=None, derandomize=True)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "(B, H, N, d)": lambda t: t.contiguous(),
    "(B, N, H, d)": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "(B, H, d, N)": lambda t: t.mT.contiguous().mT,
    "(B, H, N, d + 3)": lambda t: torch.nn.functional.pad(t, (1, 2), value=math.nan)[..., 1:-2],
}


@pytest.fixture(scope="module")
def contenders(extension) -> list[tuple[str, str]]:
    """Every part with every SIMD helper that is available here."""
    found = []
    for simd in SIMD[1:]:
        try:
            load(simd)
        except BuildError:  # there is no ispc
            continue
        found += [(part, simd) for part in PARTS if PARTS[part].operator]
    return [("part0", "auto"), *found]


@pytest.fixture(scope="module", autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """Sizes, numbers and memory layout; br, bc: part4's tile."""

    B: int
    H: int
    Nq: int
    Nk: int
    d: int
    causal: bool
    scale: float
    br: int
    bc: int
    threads: int
    layout: str
    spread: float
    seed: int

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(self.B, self.H, n, self.d) for n in (self.Nq, self.Nk, self.Nk)]
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        return self.spread * q, k, v

    def by(self, contender: tuple[str, str], q: Tensor, k: Tensor, v: Tensor, causal: bool):
        """The output and logsumexp of one contender."""
        part, simd = contender
        torch.set_num_threads(self.threads)
        held = [LAYOUTS[self.layout](t) for t in (q, k, v)]
        return attention(
            part, *held, causal=causal, scale=self.scale, br=self.br, bc=self.bc, simd=simd, return_lse=True
        )


@st.composite
def cases(draw, causal=st.booleans()) -> Case:
    masked = draw(causal)
    Nq = draw(st.integers(1, 70))
    Nk = Nq + draw(st.integers(0, 150)) if masked else draw(st.integers(1, 200))
    return Case(
        B=draw(st.integers(1, 2)),
        H=draw(st.integers(1, 3)),
        Nq=Nq,
        Nk=Nk,
        d=draw(st.integers(1, 80)),
        causal=masked,
        scale=draw(st.sampled_from([0.125, 1.0, -0.5, 0.0])),
        br=draw(st.integers(1, 80)),
        bc=draw(st.integers(1, 220)),
        threads=draw(st.sampled_from([1, 2])),
        layout=draw(st.sampled_from(list(LAYOUTS))),
        spread=draw(st.sampled_from([0.01, 1.0, 8.0])),
        seed=draw(st.integers(0, 2**31)),
    )


class Exact:
    """The exact result of a case, and PyTorch's float32 results for the same numbers."""

    def __init__(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.out, self.lse = oracle.attention(q, k, v, case.causal, case.scale)
        self.peer_out, self.peer_lse = oracle.torch_float32_in_orders(q, k, v, case.causal, case.scale)
        self.floor = max(1e-6, oracle.score_rounding(q, k, case.scale))

    def holds(self, out: Tensor, lse: Tensor) -> None:
        oracle.assert_close(out, self.out, self.peer_out, self.floor)
        oracle.assert_close(lse, self.lse, self.peer_lse)


@EXAMPLES
@given(case=cases())
def test_every_part_equals_every_other(contenders, case):
    q, k, v = case.qkv()
    exact = Exact(case, q, k, v)
    for contender in contenders:
        exact.holds(*case.by(contender, q, k, v, case.causal))


@EXAMPLES
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_permuting_keys_with_values_changes_nothing(contenders, case, order):
    q, k, v = case.qkv()
    exact = Exact(case, q, k, v)
    seen_by_all = case.Nk - case.Nq + 1 if case.causal else case.Nk
    permutation = list(range(case.Nk))
    first = permutation[:seen_by_all]
    order.shuffle(first)
    permutation[:seen_by_all] = first
    for contender in contenders:
        exact.holds(*case.by(contender, q, k[:, :, permutation], v[:, :, permutation], case.causal))


@EXAMPLES
@given(case=cases(st.just(False)), order=st.randoms(use_true_random=False))
def test_permuting_queries_permutes_rows(contenders, case, order):
    q, k, v = case.qkv()
    permutation = list(range(case.Nq))
    order.shuffle(permutation)
    exact = Exact(case, q[:, :, permutation], k, v)
    for contender in contenders:
        out, lse = case.by(contender, q, k, v, False)
        exact.holds(out[:, :, permutation], lse[:, :, permutation])


@EXAMPLES
@given(case=cases(), constant=st.sampled_from([-10_000.0, -90.0, -1.0, 0.5, 90.0, 10_000.0]))
def test_adding_a_constant_to_all_scores_changes_nothing(contenders, case, constant):
    q, k, v = case.qkv()
    exact = Exact(case, q, k, v)
    one, more, none = (torch.full_like(t[..., :1], x) for t, x in ((q, 1.0), (k, constant), (v, 0.0)))
    q, k, v = (torch.cat(pair, dim=-1) for pair in ((q, one), (k, more), (v, none)))
    moved = Exact(case, q, k, v)
    exact.out = torch.cat([exact.out, torch.zeros_like(exact.out[..., :1])], dim=-1)
    exact.peer_out, exact.peer_lse, exact.floor = moved.peer_out, moved.peer_lse, moved.floor
    exact.lse = exact.lse + case.scale * constant
    for contender in contenders:
        exact.holds(*case.by(contender, q, k, v, case.causal))


@EXAMPLES
@given(case=cases(st.just(True)), rows=st.data())
def test_causal_equals_full_on_the_keys_that_a_query_sees(contenders, case, rows):
    q, k, v = case.qkv()
    i = rows.draw(st.integers(0, case.Nq - 1))
    seen = case.Nk - case.Nq + i + 1
    row, keys, values = q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen]
    exact = Exact(case, row, keys, values)  # one query, the last one: a mask changes nothing
    for contender in contenders:
        exact.holds(*case.by(contender, row, keys, values, False))
        exact.holds(*case.by(contender, row, keys, values, True))
        out, lse = case.by(contender, q, k, v, True)
        exact.holds(out[:, :, i : i + 1].contiguous(), lse[:, :, i : i + 1].contiguous())


@EXAMPLES
@given(case=cases(), cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3))
def test_results_over_sets_of_keys_merge(contenders, case, cuts):
    q, k, v = case.qkv()
    exact = Exact(case, q, k, v)
    seen_by_all = case.Nk - case.Nq if case.causal else case.Nk  # only the last piece is masked
    places = sorted({0, *(int(cut * (seen_by_all + 1)) for cut in cuts), case.Nk})
    for contender in contenders:
        pieces = []
        for a, b in zip(places, places[1:]):
            masked = case.causal and b == case.Nk
            pieces.append(case.by(contender, q, k[:, :, a:b], v[:, :, a:b], masked))
        doubles = ((out.double(), lse.double()) for out, lse in pieces)
        out, lse = functools.reduce(lambda a, b: merge(*a, *b), doubles)
        # A weight has the error of its logsumexp, which is rounded to float32.
        exact.floor = max(exact.floor, *(2.0**-23 * float(lse.abs().max()) for _, lse in pieces))
        exact.holds(out.float(), lse.float())
