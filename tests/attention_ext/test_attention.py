"""Every part against the float64 oracle, and the rest of the contract of attention()."""

from __future__ import annotations

import math
from types import SimpleNamespace

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attention_ext
from attention_ext import PARTS, reference

attention = attention_ext.attention  # with the SIMD helpers of the fixture
pytestmark = pytest.mark.usefixtures("simd")

# Awkward shapes: (B, H, Nq, Nk, d)
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 32),
    (2, 3, 63, 63, 24),
    (1, 2, 123, 123, 80),
    (1, 4, 257, 257, 32),
    (1, 1, 1025, 1025, 16),
    (1, 2, 1, 300, 32),
    (2, 1, 7, 40, 33),
    (1, 1, 130, 1000, 64),
    (1, 1, 16, 16, 300),
]


def qkv(B, H, Nq, Nk, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, n, d, generator=generator) for n in (Nq, Nk, Nk))


def assert_same(part, got, expected):
    """Equal to the last bit for our kernels; PyTorch's sums may depend on shapes and alignment."""
    if PARTS[part].operator:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, equal_nan=True)


def check(part, q, k, v, causal=False, scale=None, **tile):
    """Compare the output and the logsumexp of a part with the oracle's."""
    out, lse = attention(part, q, k, v, causal=causal, scale=scale, return_lse=True, **tile)
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    expected = oracle.attention(q, k, v, causal, applied)
    peer = oracle.torch_float32(q, k, v, causal, applied)
    floor = max(1e-6, oracle.score_rounding(q, k, applied))
    oracle.assert_close(out, expected[0], peer[0], floor)
    oracle.assert_close(lse, expected[1], peer[1])
    assert_same(part, out, attention(part, q, k, v, causal=causal, scale=scale, **tile))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_awkward_shapes(part, shape, causal):
    check(part, *qkv(*shape), causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("bc", [1, 5, 16, 64, 4096])
@pytest.mark.parametrize("br", [1, 3, 16, 100, 4096])
def test_any_tile(extension, br, bc, causal):
    check("part4", *qkv(1, 2, 70, 83, 20), causal, br=br, bc=bc)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the implementation stays the same
)
@given(
    part=st.sampled_from([name for name, part in PARTS.items() if part.operator]),
    Nq=st.integers(1, 90),
    more=st.integers(0, 90),
    d=st.integers(1, 70),
    br=st.integers(1, 100),
    bc=st.integers(1, 100),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, 1.0, -0.5]),
)
def test_any_size(extension, part, Nq, more, d, br, bc, causal, scale):
    check(part, *qkv(1, 2, Nq, Nq + more, d), causal, scale, br=br, bc=bc)


def test_more_queries_than_keys_without_mask(part):
    check(part, *qkv(1, 2, 50, 9, 16))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_strides(part, causal):
    q, k, v = qkv(2, 3, 33, 33, 24)
    expected = attention(part, q, k, v, causal=causal)
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=2)  # (B, N, 3 H d)
    views = [t.view(2, 33, 3, 24).transpose(1, 2) for t in fused.split(72, dim=2)]
    assert not views[0].is_contiguous()
    assert_same(part, attention(part, *views, causal=causal), expected)
    columns = [t.mT.contiguous().mT for t in (q, k, v)]  # the last dimension is strided
    assert columns[0].stride(3) != 1
    torch.testing.assert_close(attention(part, *columns, causal=causal), expected)
    every_other = [torch.stack([t, -t], dim=-1)[..., 0] for t in (q, k, v)]
    assert_same(part, attention(part, *every_other, causal=causal), expected)
    one_head = [t[:, :1].expand(2, 3, 33, 24) for t in (q, k, v)]  # stride 0
    held = [t.contiguous() for t in one_head]
    assert_same(part, attention(part, *one_head, causal=causal), attention(part, *held, causal=causal))


@pytest.mark.parametrize("Nq", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("Nk", [40, 41, 300])
def test_keys_held_transposed(part, Nq, Nk):
    q, k, v = qkv(2, 3, Nq, Nk, 24)
    held = torch.full((2, 3, 24, Nk + 7), math.nan)  # (B, H, d, capacity), as in a growing cache
    held[..., :Nk] = k.mT
    check(part, q, held[..., :Nk].mT, v, causal=True, bc=64)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_of_1e4(part, causal):
    q, k, v = qkv(1, 2, 65, 65, 32)
    s = q @ k.mT
    check(part, q * (1e4 / s.abs().max()), k, v, causal, scale=1.0)


def test_equal_scores_of_minus_1e4(part):
    q, k, v = torch.ones(1, 1, 3, 4), torch.full((1, 1, 40, 4), -2500.0), qkv(1, 1, 1, 40, 4)[2]
    out, lse = attention(part, q, k, v, scale=1.0, return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full((1, 1, 3), -1e4 + math.log(40)))


@pytest.mark.parametrize("Nq", [1, 20])
def test_equal_keys_have_equal_scores(kernel, Nq):
    """To the last bit, at any position: for a score of 1e4, a bit changes the weight by a thousandth."""
    q, k, v = qkv(1, 2, Nq, 39, 33)
    k = k[:, :, :1].expand_as(k)
    out = attention(kernel, q, k, v, scale=1e4 / float((q @ k.mT).abs().max()))
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_bad_value_reaches_the_rows_that_see_it_and_no_other_head(part, which):
    """A bad query reaches its row only; a bad key or value may also reach rows above it in the same tile."""
    for value in (math.nan, math.inf, -math.inf):
        for at in (0, 20, 39):
            tensors = dict(zip("qkv", qkv(1, 2, 40, 40, 8)))
            clean = attention(part, *tensors.values(), causal=True, br=16, bc=8)
            tensors[which][0, 1, at, 3] = value
            out = attention(part, *tensors.values(), causal=True, br=16, bc=8)
            expected, _ = oracle.attention(*tensors.values(), True, 8**-0.5)
            close = dict(equal_nan=True, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out[0, 1, at:].double(), expected[0, 1, at:], **close)
            assert_same(part, out[0, 0], clean[0, 0])
            if which == "q":
                assert_same(part, out[0, 1, :at], clean[0, 1, :at])
                assert_same(part, out[0, 1, at + 1 :], clean[0, 1, at + 1 :])


def test_a_row_whose_scores_are_all_minus_infinity_at_first(kernel):
    q, k, v = torch.ones(1, 1, 2, 1), torch.zeros(1, 1, 8, 1), qkv(1, 1, 1, 8, 1)[2]
    k[0, 0, :4] = -math.inf
    out = attention(kernel, q, k, v, scale=1.0, br=2, bc=2)
    torch.testing.assert_close(out, v[:, :, 4:].mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_halves_of_the_keys_merge(part, causal):
    q, k, v = qkv(1, 2, 20, 100, 16)
    whole, lse = attention(part, q, k, v, causal=causal, return_lse=True)
    cut = 60  # all queries see the first 60 keys
    o1, l1 = attention(part, q, k[:, :, :cut], v[:, :, :cut], return_lse=True)
    o2, l2 = attention(part, q, k[:, :, cut:], v[:, :, cut:], causal=causal, return_lse=True)
    merged = reference.merge(o1, l1, o2, l2)
    torch.testing.assert_close(merged, (whole, lse))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("Nq, Nk", [(1, 2049), (3, 5000), (4, 5000), (60, 3100), (250, 2100)])
def test_few_queries_against_many_keys(kernel, threads, Nq, Nk, causal):
    """Part 4 divides the keys into spans of about 1,000, of which the last may be smaller."""
    q, k, v = qkv(1, 2, Nq, Nk, 8)
    check(kernel, q, k, v, causal)
    check(kernel, q, k, v, causal, br=7, bc=1000)
    threads(1)
    one = attention(kernel, q, k, v, causal=causal, return_lse=True)
    for count in (2, 3, 16):
        threads(count)
        assert all(map(torch.equal, attention(kernel, q, k, v, causal=causal, return_lse=True), one))


@pytest.mark.parametrize("Nq", [1, 20])
def test_bad_values_among_many_keys(kernel, Nq):
    q, k, v = qkv(1, 2, Nq, 5000, 8)
    expected, lse = attention(kernel, q[:, :, -1:], k[:, :, 3000:], v[:, :, 3000:], return_lse=True)
    k[:, :, :3000] = math.inf * -q[:, :, -1:].sign()  # the last query's scores are -inf in two whole spans
    out = attention(kernel, q, k, v, return_lse=True)
    torch.testing.assert_close([t[:, :, -1:] for t in out], [expected, lse])
    k[0, 1, 4000, 0] = math.nan
    out, lse = attention(kernel, q, k, v, return_lse=True)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan().all() and not lse[0, 0, -1].isnan()
    k[:] = math.inf * -q[:, :, -1:].sign()
    out, lse = attention(kernel, q, k, v, return_lse=True)
    assert out[:, :, -1].isnan().all() and bool((lse[:, :, -1] == -math.inf).all())


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_threads_change_nothing(kernel, threads, count):
    q, k, v = qkv(2, 3, 50, 50, 16)
    threads(1)
    expected = attention(kernel, q, k, v, causal=True, br=16, bc=16)
    threads(count)
    assert torch.equal(attention(kernel, q, k, v, causal=True, br=16, bc=16), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_threads_change_the_default_tile_and_nothing_else(extension, threads, causal):
    """More threads take smaller tiles, which cut the queries into the same strips."""
    q, k, v = qkv(1, 2, 700, 700, 16)
    threads(1)
    expected = attention("part4", q, k, v, causal=causal)
    for count in (2, 3, 5, 16):
        threads(count)
        assert torch.equal(attention("part4", q, k, v, causal=causal), expected)


def test_a_single_query_sees_the_whole_cache(part):
    q, k, v = qkv(1, 4, 1, 77, 32)
    torch.testing.assert_close(attention(part, q, k, v, causal=True), attention(part, q, k, v))


def test_inputs_are_left_alone(part):
    q, k, v = qkv(1, 2, 30, 30, 16)
    copies = [t.clone() for t in (q, k, v)]
    attention(part, q, k, v, causal=True)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies))


Q = torch.zeros(1, 2, 5, 8)
PLAIN = ("shape", "dtype", "is_cpu", "requires_grad")
MANY = torch.zeros(1).expand(1, 1, 2**32, 1)  # it takes four bytes of memory
WRONG = [
    (dict(part="part9"), ValueError, r"part is 'part9'; it must be one of part0, part1"),
    (dict(q=[1.0]), TypeError, "q is a list; it must be a tensor"),
    (
        dict.fromkeys("qkv", SimpleNamespace(**{name: getattr(Q, name) for name in PLAIN})),
        TypeError,
        "q is a SimpleNamespace; it must be a tensor",
    ),
    (dict(k=Q.double()), TypeError, "k is torch.float64; it must be torch.float32"),
    (dict(v=Q.to("meta")), ValueError, "v is on meta; it must be on the CPU"),
    (dict(q=Q[0]), ValueError, r"q has shape \(2, 5, 8\); it must be \(B, H, N, d\)"),
    (dict(q=Q[:, :, :0]), ValueError, r"q has shape \(1, 2, 0, 8\)"),
    (dict(k=Q[:, :1]), ValueError, r"k has shape \(1, 1, 5, 8\); it must be \(1, 2, Nk, 8\)"),
    (dict(k=Q[..., :4], v=Q[..., :4]), ValueError, r"k has shape \(1, 2, 5, 4\)"),
    (dict(v=Q[:, :, :3]), ValueError, r"v has shape \(1, 2, 3, 8\); it must be k's, \(1, 2, 5, 8\)"),
    (dict(k=Q[:, :, :3], v=Q[:, :, :3], causal=True), ValueError, "q has Nq=5 rows; .* at most Nk=3"),
    (dict(q=MANY, k=MANY, v=MANY), ValueError, "Nq=4294967296 .* their product must be below 2\\^50"),
    (dict(scale="big"), TypeError, "scale is a str; it must be a number"),
    (dict(simd="sse"), ValueError, "simd is 'sse'; it must be one of auto, ispc, portable, off"),
    (dict(simd=None), ValueError, "simd is None; it must be one of auto, ispc, portable, off"),
    (dict(br=0), ValueError, "br is 0; it must be at least 1"),
    (dict(bc=-3), ValueError, "bc is -3; it must be at least 1"),
    (dict(bc=2**63), ValueError, "bc is 9223372036854775808; it must be at least 1 and fit 63 bits"),
    (dict(bc=2.5), TypeError, "bc is a float; it must be a whole number"),
    (
        dict(part="part3", q=Q.clone().requires_grad_()),
        ValueError,
        "q requires a gradient; part3 computes none, only part0 and part4 do",
    ),
]


@pytest.mark.parametrize("simd", ["portable"], indirect=True)  # once is enough
@pytest.mark.parametrize("change, error, message", WRONG, ids=[w[2][:30] for w in WRONG])
def test_wrong_arguments_are_named(change, error, message):
    arguments = dict(part="part4", q=Q, k=Q, v=Q) | change
    with pytest.raises(error, match=message):
        attention_ext.attention(**arguments)


@pytest.mark.parametrize("simd", ["portable"], indirect=True)
@pytest.mark.parametrize("part", ["part0", "part4"])
def test_wrong_tensors_compile_nothing(part, monkeypatch):
    """They are named before a kernel is built, by part0 in the same words."""
    monkeypatch.setattr(attention_ext, "operator", None)
    monkeypatch.setattr(attention_ext, "_operators", {})
    for change, error, message in WRONG:
        if "part" not in change and "part4" not in message:
            with pytest.raises(error, match=message):
                attention_ext.attention(**dict(part=part, q=Q, k=Q, v=Q) | change)
