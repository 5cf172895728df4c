"""What attention() checks and promises on CUDA. PyTorch's fake tensors need no GPU and no memory."""

import pytest
import torch
from support import naming
from torch._subclasses.fake_tensor import FakeTensorMode

from shakespeare.attention_ext import PARTS, attention, operator
from shakespeare.attention_ext.cuda.kernels import Gpu, choose
from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.rules import Rules


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode():
        yield


def qkv(Nq=4, Nk=4, d=8, dtype=torch.float32, device="cuda"):
    return tuple(torch.empty(1, 2, n, d, dtype=dtype, device=device) for n in (Nq, Nk, Nk))


@pytest.mark.parametrize("dtype", Dtype, ids=str)
def test_the_operators_fake(dtype):
    q, k, v = qkv(5, 7, 33, getattr(torch, dtype.torch_name))
    q = torch.empty_strided(q.shape, (1, 1, 2, 10), dtype=q.dtype, device="cuda")
    out, lse = attention("part4", q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and out.is_contiguous() and (out.dtype, out.device) == (q.dtype, q.device)
    assert lse.shape == q.shape[:3] and (lse.dtype, lse.device) == (torch.float32, q.device)
    assert attention("part4", q, k, v).shape == q.shape
    q = torch.empty(1, 5, 2, 33, dtype=q.dtype, device="cuda").transpose(1, 2)
    assert attention("part4", q, k, v).transpose(1, 2).is_contiguous()


def test_rules_and_heads_that_share_keys():
    q, k, v = (torch.empty(2, h, 5, 8, device="cuda", dtype=torch.float16) for h in (6, 2, 2))
    given = dict(window=(3, None), softcap=2.0, sinks=torch.empty(6, device="cuda"))
    given |= dict(documents=torch.empty(2, 5, device="cuda", dtype=torch.int32))
    bias = torch.empty(1, 6, 5, 5, device="cuda")
    for options in ({}, given, dict(bias=bias), dict(bias=bias > 0)):
        out, lse = attention("part4", q, k, v, return_lse=True, **options)
        assert out.shape == q.shape and (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    from shakespeare.attention_ext.cuda.operators import flash_backward

    call = (q, None, q, k, v, out, lse, False, 0.3, None, True, *Rules(bias=bias).on_cuda().arguments())
    *found, dbias = flash_backward(*call)
    assert [t.shape for t in found] == [q.shape, k.shape, v.shape]
    assert (dbias.shape, dbias.dtype) == ((2, 6, 5, 5), torch.float32)
    for options, message in (
        (dict(kernel="3"), "kernel is '3'; with rules, or fewer heads of .* must be one of 4, 5, 6, split"),
        (dict(bias=torch.empty(1, 1, 5, 4, device="cuda")), r"bias has shape \(1, 1, 5, 4\); it must be"),
        (dict(score_mod="none.h"), "score_mod is 'none.h'; it must be the path of a C.. header"),
        (dict(sinks=torch.empty(6, device="cpu")), "sinks is on cpu; it must be on q's cuda:0"),
    ):
        with naming(options), pytest.raises(ValueError, match=message):
            attention("part4", q, k, v, **options)


def test_parts_1_to_3_are_refused():
    for part in (name for name, row in PARTS.items() if "cuda" not in row.dtypes):
        with pytest.raises(ValueError, match=f"q is on cuda:0; it must be on the CPU in {part}"):
            attention(part, *qkv())


def test_a_wrong_argument_is_named():
    for sizes, options, error, message in (
        ({}, dict(kernel="7"), ValueError, "kernel is '7'; it must be one of 1, 2-unpadded, 2"),
        ({}, dict(bc=64), ValueError, "bc is 64; it must be left out on CUDA"),
        (dict(dtype=torch.float64), {}, TypeError, "q is torch.float64; it must be torch.float32 or torch.b"),
        (dict(d=257), {}, ValueError, "q has d=257; it must be at most 256 on CUDA in part4"),
        (dict(Nq=2**31), {}, ValueError, "q has Nq=2147483648 rows; it must have at most 2147482624 on CUDA"),
        (dict(Nk=2**31), {}, ValueError, "k has Nk=2147483648 rows; it must have at most 2147482624 on CUDA"),
        (dict(Nq=5), dict(causal=True), ValueError, "q has "),
        (dict(device="cpu"), dict(kernel="2"), ValueError, "kernel is '2'; it must be left out with"),
    ):
        with naming(sizes, options), pytest.raises(error, match=message):
            attention("part4", *qkv(**sizes), **options)


def test_the_operator_called_directly_checks_too():
    q, k, v = qkv()
    for tensors, kernel, message in (
        ((q, *qkv(d=4)[1:]), None, r"k has shape \(1, 2, 4, 4\)"),
        ((q, k, qkv(Nk=2)[2]), "2", r"v has shape \(1, 2, 2, 8\)"),
        ((q, k, v), "7", "kernel is '7'; it must be one of 1,"),
    ):
        with pytest.raises(ValueError, match=message):
            operator("part4", "cuda")(*tensors, False, 1.0, kernel)


def test_tensors_on_two_devices_are_named():
    q, k, v = qkv()
    for other in ("cpu", "cuda:1")[: torch.cuda.device_count()]:
        with pytest.raises(ValueError, match=f"k is on {other}; it must be on q's cuda:0"):
            attention("part4", q, k.to(other), v)


def test_a_gpu_that_is_too_old_or_small_is_named():
    old, small = (Gpu("A GPU", capability, 48 * 1024, 80) for capability in ((7, 0), (8, 0)))
    with pytest.raises(ValueError, match="kernel is '2'; it needs compute capability 7.5 or more; A GPU has"):
        choose("2", 32, Dtype.FP32, old)
    with pytest.raises(ValueError, match="kernel is '4'; it takes fp32, not bf16"):
        choose("4", 32, Dtype.BF16, small)
    with pytest.raises(ValueError, match="d = 256 it needs .* bytes of shared memory, and this GPU gives"):
        choose("2", 256, Dtype.FP32, small)
