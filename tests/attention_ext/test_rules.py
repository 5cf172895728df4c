"""Rules of attention against their definition in float64: any of them together, every part, gradients."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import library as torch_library

from shakespeare.attention_ext import BuildError, attention, rules
from shakespeare.attention_ext.extension import load
from shakespeare.attention_ext.parts import PARTS

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
LEAVES = ("q", "k", "v", "bias", "sinks")


@st.composite
def calls(draw):
    """The tensors and the options of a call, in float64."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    number = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    B, Hk, group, d = (draw(st.integers(1, most)) for most in (2, 2, 3, 40))
    Nq, more, H = draw(st.integers(1, 150)), draw(st.integers(0, 150)), Hk * group
    Nk = Nq + more
    side = st.none() | st.integers(0, 70)
    wide = (draw(st.sampled_from([1, B])), draw(st.sampled_from([1, H])), Nq, Nk)
    biases = (number(*wide), number(*wide) > 0, number(*wide).masked_fill(number(*wide) > 0, -torch.inf))
    documents = torch.stack([torch.arange(Nk) // draw(st.integers(1, 99)), torch.arange(Nk) * 7 % 3])
    options = dict(
        window=(draw(side), draw(side)),
        scale=draw(st.sampled_from([0.0, -0.3])),  # the gradient of bias has no factor
        softcap=draw(st.sampled_from([0.5, 3.0, 30.0])),
        alibi_slopes=number(*draw(st.sampled_from([(H,), (B, H)]))).abs(),
        sinks=number(H),
        bias=draw(st.sampled_from(biases)),
        documents=documents[[draw(st.integers(0, 1)) for _ in range(B)]],
    )
    chosen = draw(st.sets(st.sampled_from(sorted(options)), min_size=1))
    options = {name: value for name, value in options.items() if name in chosen}
    q, k, v, dout = number(B, H, Nq, d), number(B, Hk, Nk, d), number(B, Hk, Nk, d), number(B, H, Nq, d)
    return dict(q=q, k=k, v=v) | options | dict(causal=draw(st.booleans())), (dout, number(B, H, Nq))


def as_floats(call):
    return {n: t.float() if getattr(t, "dtype", None) == torch.float64 else t for n, t in call.items()}


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(call=calls(), br=st.sampled_from([None, 1, 16, 33]), bc=st.sampled_from([None, 7, 64]))
def test_any_rules_together(attend, call, br, bc):
    (held, _), floats = call, as_floats(call[0])
    exact, peer = oracle.defined(**held), attention("part0", **floats, return_lse=True)
    got = attend(**floats, br=br, bc=bc, return_lse=True)
    for mine, right, theirs in zip(got, exact, peer):
        some = torch.isfinite(right)
        assert torch.equal(torch.isfinite(mine), some)
        oracle.assert_close(mine[some], right[some], theirs[some], 3e-6)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(call=calls())
def test_gradients(extension, call):
    (held, given), floats = call, as_floats(call[0])

    def gradients(function, call):
        leaves = [call[n].requires_grad_() for n in LEAVES if n in call and call[n].is_floating_point()]
        out, lse = function(**call)
        seen = torch.isfinite(lse)
        total = (out * given[0]).sum() + (lse.masked_fill(~seen, 0) * given[1]).sum()
        return torch.autograd.grad(total, leaves)

    exact = gradients(oracle.defined, held)
    peers = gradients(lambda **call: attention("part0", **call, return_lse=True), floats)
    got = gradients(lambda **call: attention("part4", **call, return_lse=True), floats)
    for mine, right, theirs in zip(got, exact, peers):
        oracle.assert_close(mine.contiguous(), right, theirs, 1e-5)


def test_one_query_of_grouped_heads_and_a_long_cache(attend):
    q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 3000, 16), torch.randn(2, 2, 3000, 16)
    call = dict(q=q, k=k, v=v, causal=True)
    exact = oracle.defined(**{n: t if n == "causal" else t.double() for n, t in call.items()})
    for mine, right in zip(attend(**call, return_lse=True), exact):
        oracle.assert_close(mine, right, right)


def test_few_queries_and_transposed_keys(attend):
    """As of a decoder's panels, whose kernel knows neither sinks nor a query that sees no key."""
    for Nq, Nk, rule in ((1, 9, "sinks"), (2, 40, "sinks"), (3, 40, "bias"), (3, 1, "window")):
        q, k, v = torch.randn(1, 2, Nq, 16), torch.randn(1, 2, Nk, 16), torch.randn(1, 2, Nk, 16)
        seen = torch.arange(Nq)[:, None].expand(Nq, Nk) > 0
        rules = dict(sinks=torch.randn(2), bias=seen[None, None], window=(0, 0))
        columns = k.mT.contiguous().mT
        for mine, right in zip(
            attend(q, columns, v, return_lse=True, **{rule: rules[rule]}),
            attention("part0", q, k, v, return_lse=True, **{rule: rules[rule]}),
        ):
            torch.testing.assert_close(mine, right)


def test_everything_hidden_gives_zeros(attend):
    q = torch.randn(1, 2, 40, 16)
    out, lse = attend(q, q, q, bias=torch.zeros(1, 1, 40, 40, dtype=torch.bool), return_lse=True)
    assert not out.any() and torch.equal(lse, torch.full((1, 2, 40), -torch.inf))


def test_a_sink_near_the_lowest_float_has_no_weight(attend):
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    sinks = torch.full((2,), torch.finfo(torch.bfloat16).min)  # in powers of two it is below float32's
    exact = oracle.defined(q.double(), k.double(), v.double())
    for mine, right in zip(attend(q, k, v, sinks=sinks, return_lse=True), exact):
        oracle.assert_close(mine, right, right, 3e-6)


def test_slopes_that_need_a_gradient_are_refused_only_where_one_is_computed(extension):
    q, slopes = torch.randn(1, 2, 5, 8), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        attention("part4", q, q, q, alibi_slopes=slopes)
    with torch.no_grad():
        out = attention("part4", q, q, q, alibi_slopes=slopes)
    assert torch.equal(out, attention("part4", q, q, q, alibi_slopes=slopes.detach()))


def test_operators_keep_pytorchs_contract(extension):
    q = torch.randn(1, 2, 20, 8)
    bias, sinks = torch.randn(1, 1, 20, 20), torch.randn(2)
    kernels = load("auto")
    for part in PARTS.values():
        if part.operator:
            given = rules.Rules(left=5, softcap=2.0, bias=bias, sinks=sinks).arguments()
            call = (q, q, q, True, 0.3, True, 4, 8, *given)
            torch_library.opcheck(getattr(kernels, f"{part.operator}_ruled").default, call)
    leaves = [t.clone().requires_grad_() for t in (q, q, q, bias, sinks)]
    given = rules.Rules(left=5, softcap=2.0, bias=leaves[3], sinks=leaves[4]).arguments()
    call = (*leaves[:3], True, 0.3, 4, 8, *given)
    torch_library.opcheck(kernels.part4_with_gradient_ruled.default, call)


HEADER = """
inline bool seen(At at) { return (at.i + at.j + at.h + at.b) % 3 != 0; }
inline float score(float s, At at) { return s * s * 0.3f + at.h - 0.01f * (at.i - at.j); }
inline float slope(float s, At) { return 0.6f * s; }
"""


def test_a_users_change_of_scores(attend, tmp_path):
    """The header squares scores: of what a bias hides it would make the largest."""
    (tmp_path / "mine.h").write_text(HEADER)
    q, k, v = (torch.randn(2, 2, 50, 16) for _ in range(3))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 50, 50)), indexing="ij")
    s = (q.double() @ k.double().mT / 4) ** 2 * 0.3 + h - 0.01 * (i - j)
    s = s.masked_fill(((i + j + h + b) % 3 == 0) | (j > i + 9), -torch.inf)
    seen = (i - j) % 5 != 2
    for bias in (None, seen, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)):
        exact = torch.softmax(s if bias is None else s.masked_fill(~seen, -torch.inf), -1) @ v.double()
        got = attend(q, k, v, score_mod=tmp_path / "mine.h", window=(None, 9), bias=bias)
        oracle.assert_close(got, exact, exact.float(), 3e-6)


def test_a_users_change_of_scores_has_gradients(extension, tmp_path):
    """part4's are part0's, which are the header's slope in PyTorch's graph."""
    (tmp_path / "mine.h").write_text(HEADER)
    tensors = [torch.randn(1, 2, 40, 8).requires_grad_() for _ in range(3)]
    bias = torch.randn(1, 1, 40, 40).requires_grad_()
    given = dict(score_mod=str(tmp_path / "mine.h"), softcap=2.0, bias=bias, causal=True)
    both = [
        torch.autograd.grad(attention(part, *tensors, **given).square().sum(), [*tensors, bias])
        for part in ("part0", "part4")
    ]
    for theirs, mine in zip(*both):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sign.inc").write_text("constexpr float SIGN = 1;")
    (tmp_path / "mine.h").write_text('#include "lib/sign.inc"\nfloat score(float s, At) { return SIGN * s; }')
    q = torch.randn(1, 1, 9, 8)
    plain = attention("part4", q, q, q, score_mod=tmp_path / "mine.h")
    torch.testing.assert_close(plain, attention("part4", q, q, q))
    (tmp_path / "lib" / "sign.inc").write_text("constexpr float SIGN = -1;")
    assert not torch.allclose(attention("part4", q, q, q, score_mod=tmp_path / "mine.h"), plain)
    with pytest.raises(ValueError, match=r"mine.h; its gradient needs slope\(float s, At at\)"):
        attention("part4", *tensors, score_mod=tmp_path / "mine.h")
    (tmp_path / "mine.h").write_text("float score(float s) { return -s; }")
    with pytest.raises(BuildError, match=r"score_mod.cpp.*error") as raised:
        attention("part0", *tensors, score_mod=tmp_path / "mine.h")
    assert "score" in raised.value.output


@pytest.mark.parametrize(
    "part, given, message",
    [
        ("part1", dict(window=5), "window is an int; it must be .left, right."),
        ("part1", dict(window=(1, -1)), "its sides must be at least 0, or None for no limit"),
        ("part2", dict(softcap=0), "softcap is 0; it must be above 0"),
        ("part0", dict(softcap=math.nan), "softcap is nan; it must be finite"),
        ("part3", dict(alibi_slopes=[1.0]), "alibi_slopes is a list; it must be a tensor of torch.float32"),
        ("part0", dict(score_mod="none.h"), "score_mod is 'none.h'; it must be the path of a C.. header"),
        ("part4", dict(sinks=torch.zeros(3)), r"sinks has shape \(3,\); it must be \(4,\)"),
        ("part4", dict(sinks=torch.full((4,), torch.inf)), "sinks holds NaN or infinity"),
        ("part4", dict(bias=torch.zeros(9, 9)), r"bias has shape \(9, 9\); it must be \(2, 4, 9, 9\) or"),
        ("part4", dict(documents=torch.zeros(2, 9)), "documents is torch.float32; .* of torch.int64"),
        ("part4", dict(alibi_slopes=torch.zeros(4).requires_grad_()), "only q, k, v, bias and sinks have"),
    ],
)
def test_wrong_rules_are_named(part, given, message):
    q = torch.zeros(2, 4, 9, 8)
    with pytest.raises((TypeError, ValueError), match=message):
        attention(part, q, q, q, **given)


def test_what_has_no_rules_says_so():
    q = torch.zeros(1, 4, 9, 8)
    half = q.bfloat16()
    with pytest.raises(ValueError, match="must be left out with part4 on the CPU in bf16"):
        attention("part4", half, half, half, window=(1, None))
    with pytest.raises(ValueError, match="q has H=4 heads; it must be a multiple of k's 3"):
        attention("part0", q, q[:, :3], q[:, :3])
