"""attention() in bfloat16: the contract of float32, with an error of at most twice that of PyTorch's SDPA."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from support import naming
from torch import library as torch_library
from torch.nn import functional as F

from attention_ext import attention, extension, operator, reference
from attention_ext.parts import Dtype, check_dtype, taking

pytestmark = pytest.mark.usefixtures("extension")
BF16_PARTS = taking(Dtype.BF16)
EXACT = dict(rtol=0, atol=0)  # of our own kernel; PyTorch's sums may depend on the strides
# (B, H, Nq, Nk, d): with and without whole blocks of 32, few queries, many keys
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 2, 1, 300, 32),
    (2, 1, 3, 40, 33),
    (1, 2, 31, 31, 64),
    (1, 2, 32, 32, 32),
    (2, 3, 63, 63, 24),
    (1, 4, 257, 257, 32),
    (1, 1, 130, 1000, 64),
    (1, 2, 123, 123, 80),
    (1, 1, 40, 64, 256),
    (1, 1, 33, 2500, 16),
]


def qkv(B, H, Nq, Nk, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, n, d, generator=generator).bfloat16() for n in (Nq, Nk, Nk))


def check(part, q, k, v, causal=False, scale=None, **tile):
    """Compare a part with the oracle. The output's peer is SDPA in bfloat16; the logsumexp is float32."""
    out, lse = attention(part, q, k, v, causal=causal, scale=scale, return_lse=True, **tile)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32) and out.is_contiguous()
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    exact, exact_lse = oracle.attention(q, k, v, causal, applied)
    mask = reference.visible(q.shape[2], k.shape[2]) if causal else None
    peer = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=applied)
    # SDPA may round one number of a small case to the exact one; half a unit in the last place is the floor.
    oracle.assert_close(out.float(), exact, peer.double(), floor=2**-9)
    rounding = max(1e-6, oracle.score_rounding(q, k, applied))
    oracle.assert_close(lse, exact_lse, exact_lse, floor=4 * rounding)
    assert torch.equal(out, attention(part, q, k, v, causal=causal, scale=scale, **tile))


@pytest.mark.parametrize("part", BF16_PARTS)
def test_the_error_is_at_most_twice_sdpas(part):
    for shape in SHAPES:
        for causal in (False, True):
            with naming(shape, causal):
                check(part, *qkv(*shape), causal)
    for scale in (0.0, -0.3, 3.0):
        with naming(scale):
            check(part, *qkv(1, 2, 70, 83, 32), causal=True, scale=scale)


def test_any_tile():
    for br, bc in ((1, 1), (7, 33), (100, 64), (4096, 4096)):
        with naming(br, bc):
            check("part4", *qkv(1, 2, 70, 83, 32), causal=True, br=br, bc=bc)


@pytest.mark.parametrize("part", BF16_PARTS)
def test_any_strides(part):
    q, k, v = (t.transpose(1, 2) for t in qkv(1, 50, 3, 3, 32))
    dense = [t.contiguous() for t in (q, k, v)]
    wide = [torch.stack([t, t], -1)[..., 0] for t in dense]  # every second number of a row
    for tensors in ((q, k, v), wide):
        got, expected = (attention(part, *given, causal=True) for given in (tensors, dense))
        torch.testing.assert_close(got, expected, **EXACT if part == "part4" else {})


def test_threads_change_no_bit(threads):
    for shape in ((1, 3, 200, 200, 32), (1, 1, 2, 5000, 16)):
        q, k, v = qkv(*shape)
        threads(1)
        one = attention("part4", q, k, v, causal=True, return_lse=True)
        for count in (2, 3, 16):
            threads(count)
            with naming(shape, count):
                assert all(map(torch.equal, attention("part4", q, k, v, causal=True, return_lse=True), one))


@pytest.mark.parametrize("part", BF16_PARTS)
def test_a_nan_reaches_the_rows_that_see_it_and_hidden_at_most_those_of_its_tile(part):
    at, tile = 100, 32
    for name in "qkv":
        inputs = dict(zip("qkv", qkv(1, 2, 160, 160, 32)))
        clean = attention(part, **inputs, causal=True, br=tile, bc=tile)
        inputs[name][0, 1, at, 5] = math.nan
        out = attention(part, **inputs, causal=True, br=tile, bc=tile)
        may = torch.zeros(1, 2, 160, dtype=torch.bool)
        first = at // tile * tile if part == "part4" else 0  # PyTorch's products take all rows together
        may[0, 1, slice(at, at + 1) if name == "q" else slice(first, None)] = True
        with naming(name):
            torch.testing.assert_close(out[~may], clean[~may], **EXACT if part == "part4" else {})
            seeing = out[0, 1, at : at + 1 if name == "q" else None]
            assert (seeing[:, 5] if name == "v" else seeing).isnan().all()  # a NaN of v is of one feature


def test_growing_scores():
    """Each block of keys has a maximum far above those before, so the output is rescaled."""
    q, k, v = qkv(1, 1, 64, 640, 32)
    q, k = q.abs() + 1, (k.abs() * torch.linspace(0, 12, 640)[:, None]).bfloat16()
    check("part4", q, k, v)
    check("part4", q, k.flip(2), v)


def test_results_over_parts_of_the_keys_merge():
    q, k, v = qkv(1, 2, 64, 300, 32)
    whole, lse = attention("part4", q, k, v, return_lse=True)
    o1, l1 = attention("part4", q, k[:, :, :130], v[:, :, :130], return_lse=True)
    o2, l2 = attention("part4", q, k[:, :, 130:], v[:, :, 130:], return_lse=True)
    out, merged = reference.merge(o1.float(), l1, o2.float(), l2)
    torch.testing.assert_close(out, whole.float(), rtol=1 / 64, atol=4e-3)
    torch.testing.assert_close(merged, lse)


def test_other_parts_and_mixed_types_are_refused():
    q, k, v = qkv(1, 1, 4, 4, 8)
    for part in ("part1", "part2", "part3"):
        with pytest.raises(TypeError, match=f"q is torch.bfloat16; it must be torch.float32 in {part}"):
            attention(part, q, k, v)
        with pytest.raises(ValueError, match=f"dtype is 'bf16'; {part} does not take it, only part0, part4"):
            check_dtype(part, "bf16")
    with pytest.raises(TypeError, match="k is torch.float32; it must be q's torch.bfloat16"):
        attention("part4", q, k.float(), v)
    with pytest.raises(TypeError, match="v is torch.float16; it must be torch.float32 or torch.bfloat16"):
        attention("part4", q, k, v.half())
    with pytest.raises(RuntimeError, match="k has another type; it must be bfloat16, as q is"):
        operator("part4")(q, k.float(), v, False, 1.0, False, 8, 8)
    with pytest.raises(ValueError, match="dtype is 'fp8'; it must be one of fp32, bf16"):
        check_dtype("part4", "fp8")


def test_the_scratch_of_expanded_keys_is_counted():
    """AMX would copy V: 2^69 numbers here, which a signed 64-bit size cannot hold."""
    size = extension.scratch("part4", 2**10, 2**10, 32, 2**44, 32, br=32, bc=32, dtype=Dtype.BF16)
    assert 0 < size < 2**40
    # The size of a copied tile of 2^42 keys of 2^20 features would not fit either.
    size = extension.scratch("part4", 1, 1, 1, 2**42, 2**20, bc=2**42, threads=2, dtype=Dtype.BF16)
    assert 2**20 < size < 2**40


def test_huge_values_do_not_overflow():
    """The maximum may lag behind the scores, but only as far as the sums of the values allow."""
    q, k, v = qkv(1, 1, 32, 64, 32)
    q[:] = 1
    k[:, :, :32], k[:, :, 32:] = 0, 5
    for size in (1e24, 1e36):
        v[:] = size
        out = attention("part4", q, k, v, scale=0.225)
        torch.testing.assert_close(out.float(), v[:, :, :32].float(), rtol=2**-7, atol=0)


@pytest.mark.full
def test_opcheck():
    for Nq in (1, 20, 64):
        q, k, v = qkv(1, 2, Nq, 70, 32)
        with naming(Nq):
            torch_library.opcheck(operator("part4"), (q, k, v, True, 0.3, True, 8, 16))
    expected = attention("part4", q, k, v)  # loads the operator, which torch.compile cannot do
    compiled = torch.compile(lambda *qkv: attention("part4", *qkv), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), expected)
