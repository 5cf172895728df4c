"""Every part against the float64 oracle, and the rest of the contract of attention()."""

import math
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import naming

from shakespeare import attention_ext
from shakespeare.attention_ext import PARTS, attention
from shakespeare.attention_ext.parts import compatible

SHAPES = [
    *oracle.SHAPES,
    (2, 1, 3, 40, 33),
    (1, 2, 31, 31, 64),
    (1, 2, 32, 32, 32),
    (1, 1, 40, 64, 256),
    # Part 4 divides the keys of few queries into splits of about 1,000; the last may be smaller.
    (1, 2, 1, 2049, 8),
    (1, 2, 3, 5000, 8),
    (1, 2, 60, 3100, 8),
    (1, 1, 33, 2500, 16),
]
MASKS = (False, True)


def check(attend, q, k, v, causal=False, scale=None, **tile):
    """Compare the output and the logsumexp with the oracle's. The inputs must stay as they are."""
    copies = [t.clone() for t in (q, k, v)]
    out, lse = attend(q, k, v, causal=causal, scale=scale, return_lse=True, **tile)
    assert out.dtype == attend.dtype and out.is_contiguous()
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    exact, exact_lse = oracle.attention(q, k, v, causal, applied)
    peer, peer_lse = oracle.torch_float32(q, k, v, causal, applied)
    floor = max(1e-6, oracle.score_rounding(q, k, applied))
    if attend.dtype == torch.float32:
        oracle.assert_close(out, exact, peer, floor)
        oracle.assert_close(lse, exact_lse, peer_lse)
    else:
        # SDPA may give the exact number in a small case: the floor is half a unit in the last place.
        oracle.assert_close(out.float(), exact, peer.double(), floor=2**-9)
        oracle.assert_close(lse, exact_lse, exact_lse, floor=4 * floor)
    attend.assert_same(attend(q, k, v, causal=causal, scale=scale, **tile), out)
    assert all(map(torch.equal, (q, k, v), copies))


def test_awkward_shapes(attend):
    for shape in SHAPES:
        for causal in MASKS:
            with naming(shape, causal):
                check(attend, *attend.qkv(*shape), causal)
    check(attend, *attend.qkv(1, 2, 50, 9, 16))  # more queries than keys


TILES = st.one_of(st.integers(1, 100), st.just(4096))
SIZES = dict(Nq=st.integers(1, 90), more=st.integers(0, 90), d=st.integers(1, 70))
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # on a busy machine


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(**SIZES, br=TILES, bc=TILES, causal=st.booleans(), scale=st.sampled_from([None, 0.0, 1.0, -0.5]))
def test_any_size(attend, Nq, more, d, br, bc, causal, scale):
    check(attend, *attend.qkv(1, 2, Nq, Nq + more, d), causal, scale, br=br, bc=bc)


def test_strides(attend):
    tensors = attend.qkv(2, 3, 33, 33, 24)
    one_head = [t[:, :1].expand_as(t) for t in tensors]  # stride 0
    for name, held in {**oracle.strided(*tensors), "one head": one_head}.items():
        same = torch.testing.assert_close if name == "columns" else attend.assert_same
        for causal in MASKS:
            with naming(name, causal):
                assert not held[0].is_contiguous()
                copies = [t.contiguous() for t in held]
                same(attend(*held, causal=causal), attend(*copies, causal=causal))


def test_keys_held_transposed(attend):
    """Robustness tests have more sizes."""
    for Nq, Nk in ((1, 300), (4, 41), (40, 40)):
        q, k, v = attend.qkv(2, 3, Nq, Nk, 24)
        check(attend, q, torch.nn.functional.pad(k.mT, (0, 7))[..., :Nk].mT, v, causal=True, bc=64)


def test_scores_of_1e4(attend):
    if attend.part == "part0" and attend.dtype != torch.float32:
        pytest.skip("PyTorch rounds the scores to bfloat16")
    q, k, v = attend.qkv(1, 2, 65, 65, 32)
    s = q @ k.mT
    for causal in MASKS:
        check(attend, q * (1e4 / s.abs().max()), k, v, causal, scale=1.0)
    if attend.part == "part0":
        return  # MKL's products of equal keys may differ by a bit: those of the last columns do on an Intel
    # Equal keys have equal scores to the last bit: at 1e4, a bit changes a weight by a thousandth.
    for Nq, largest in ((1, 1e4), (20, 1e4), (20, 1e30)):
        q, k, v = attend.qkv(1, 2, Nq, 39, 33)
        k = k[:, :, :1].expand_as(k)
        out = attend(q, k, v, scale=largest / float((q @ k.mT).abs().max()))
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_bad_value_reaches_the_rows_that_see_it_and_masked_at_most_those_of_its_tile(attend, value):
    at, tile = 100, 16
    for which in "qkv":
        tensors = dict(zip("qkv", attend.qkv(1, 2, 160, 160, 8)))
        clean = attend(**tensors, causal=True, br=tile, bc=tile)
        tensors[which][0, 1, at, 3] = value
        out = attend(**tensors, causal=True, br=tile, bc=tile)
        exact, _ = oracle.attention(*tensors.values(), True, 8**-0.5)
        may = torch.zeros(1, 2, 160, 1, dtype=torch.bool)
        may[0, 1, at : at + 1 if which == "q" else None] = True
        if which != "q":  # PyTorch's products take all rows together
            may[0, 1, at // tile * tile if PARTS[attend.part].operator else 0 : at] = True
        with naming(which):
            assert not (out.isfinite() & ~exact.isfinite()).any()
            attend.assert_same(out.masked_select(~may), clean.masked_select(~may))


def test_scores_of_minus_infinity(attend):
    """In a whole tile, or in whole splits of many keys, before a finite one."""
    for Nk, tile in ((8, dict(br=2, bc=2)), (5000, {})):
        q, k, v = attend.qkv(1, 1, 2, Nk, 1)
        q[:], k[:] = 1, 0
        k[:, :, : Nk // 2] = -math.inf
        out = attend(q, k, v, scale=1.0, **tile)
        torch.testing.assert_close(out, v[:, :, Nk // 2 :].mean(2, keepdim=True).expand_as(out))


def test_threads_change_nothing(attend, threads):
    """More threads take smaller default tiles, which cut the queries into the same strips."""
    if not PARTS[attend.part].operator:
        pytest.skip("PyTorch's sums may depend on the threads")
    cases = [((2, 3, 50, 50, 16), dict(br=16, bc=16)), ((1, 2, 700, 700, 16), {}), ((1, 2, 4, 5000, 8), {})]
    for shape, tile in cases:
        for causal in MASKS:
            tensors = attend.qkv(*shape)
            threads(1)
            one = attend(*tensors, causal=causal, return_lse=True, **tile)
            for count in (2, 3, 5, 16):
                threads(count)
                again = attend(*tensors, causal=causal, return_lse=True, **tile)
                assert all(map(torch.equal, again, one)), (shape, causal, count)


Q = torch.zeros(1, 2, 5, 8)
LIKE = SimpleNamespace(shape=Q.shape, dtype=Q.dtype, is_cpu=True, requires_grad=False)
MANY = torch.zeros(1).expand(1, 1, 2**32, 1)  # it takes four bytes of memory
WRONG_TENSORS = [
    (dict(q=[1.0]), TypeError, "q is a list; it must be a tensor"),
    (dict.fromkeys("qkv", LIKE), TypeError, "q is a SimpleNamespace of shape .*; it must be a tensor"),
    (dict(k=Q.double()), TypeError, "k is torch.float64; it must be torch.float32"),
    (dict(v=Q.to("meta")), ValueError, "v is on meta; it must be on the CPU"),
    (dict(q=Q[0]), ValueError, r"q has shape \(2, 5, 8\); it must be \(B, H, N, d\)"),
    (dict(q=Q[:, :, :0]), ValueError, r"q has shape \(1, 2, 0, 8\)"),
    (dict(k=Q[:, :1]), ValueError, r"v has shape \(1, 2, 5, 8\); it must be k's, \(1, 1, 5, 8\)"),
    (dict(k=Q[..., :4], v=Q[..., :4]), ValueError, r"k has shape \(1, 2, 5, 4\)"),
    (dict(v=Q[:, :, :3]), ValueError, r"v has shape \(1, 2, 3, 8\); it must be k's, \(1, 2, 5, 8\)"),
    (dict(k=Q[:, :, :3], v=Q[:, :, :3], causal=True), ValueError, "q has Nq=5 rows; .* at most Nk=3"),
    (dict(q=MANY, k=MANY, v=MANY), ValueError, "Nq=4294967296 .* their product must be below 2\\^50"),
    (dict(scale="big"), TypeError, "scale is a str; it must be a number"),
    (dict(simd="sse"), ValueError, "simd is 'sse'; it must be one of auto, ispc, portable, off"),
    (dict(scale=True), TypeError, "scale is a bool; it must be a number"),
    (dict(scale=torch.tensor([0.5])), TypeError, r"scale is a Tensor of shape \(1,\); it must be a number"),
    (dict(scale=np.float32("nan")), ValueError, "scale is nan; it must be finite"),
    (dict(scale=-math.inf), ValueError, "scale is -inf; it must be finite"),
    (dict(causal="no"), TypeError, "causal is a str; it must be True or False"),
    (dict(br=torch.tensor(True)), TypeError, "br is a Tensor; it must be a whole number"),
    (dict(br=torch.tensor([4])), TypeError, r"br is a Tensor of shape \(1,\); it must be a whole"),
    (dict(br=0), ValueError, "br is 0; it must be at least 1"),
    (dict(bc=2**63), ValueError, "bc is 9223372036854775808; it must be at least 1 and fit 63 bits"),
    (dict(bc=2.5), TypeError, "bc is a float; it must be a whole number"),
    (dict(windows=(1, 1)), TypeError, "got an unexpected keyword argument 'windows'"),
    (dict(scale=math.inf, score_mod="none.h"), ValueError, "scale is inf; it must be finite"),
]
APART = [
    ("part4", "webgpu", {"gradient": True}, "device is 'webgpu'; it must be cpu or cuda for gradients"),
    ("part4", "cuda", {"rules": ("window", "bias", "score_mod"), "gradient": True}, "None"),
    ("part0", "cuda", {"rules": ("bias", "score_mod")}, "None"),
    ("part0", "cuda", {"kernel": "5"}, "kernel is '5'; it must be left out with part0 on CUDA"),
    ("part4", "cuda", {"kernel": "5", "gradient": True, "rules": ("sinks",), "dtype": "fp16"}, "None"),
]


def test_what_goes_together():
    """tests/app/cli/test_errors.py and the tests of each device have the other sentences."""
    for part, device, options, sentence in APART:
        assert str(compatible(part, device, **options)).startswith(sentence), (part, device, options)


WRONG_PART = dict(part="part9"), ValueError, r"part is 'part9'; it must be one of part0, part1"


def test_numbers_of_numpy_and_tensors_count_as_numbers_and_none_as_the_default(attend):
    q, k, v = attend.qkv(1, 2, 40, 40, 8)
    for kind in (np.float64, np.array, torch.tensor):
        whole = np.int64 if kind is np.float64 else kind
        given = dict(scale=kind(0.5), br=whole(8), bc=whole(16), causal=kind(1) == 1)
        with naming(given):
            attend.assert_same(attend(q, k, v, **given), attend(q, k, v, scale=0.5, br=8, bc=16, causal=True))
    nones = dict.fromkeys(("scale", "causal", "simd", "br", "bc", "return_lse"))
    attend.assert_same(attention(attend.part, q, k, v, **nones), attention(attend.part, q, k, v))


def test_wrong_arguments_are_named_before_anything_is_compiled(monkeypatch):
    """By part0 and part4 in the same words."""
    monkeypatch.setattr(attention_ext, "operator", None)
    monkeypatch.setattr(attention_ext, "_operators", {})
    both = ((dict(part=part) | row[0], *row[1:]) for part in ("part0", "part4") for row in WRONG_TENSORS)
    for change, error, message in (*both, WRONG_PART):
        with naming(change), pytest.raises(error, match=message):
            attention(**dict(q=Q, k=Q, v=Q) | change)
