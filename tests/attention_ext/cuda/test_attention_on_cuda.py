"""attention() on a GPU: each kernel in each dtype against the float64 oracle, and the contract."""

import math
import os
import random
import sys

import oracle
import pytest
import torch
from support import ROOT, naming, printed
from torch import library as torch_library
from torch.nn import functional as F

from shakespeare.attention_ext import attention, operator, reference
from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import KERNELS, Gpu
from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.rules import checked

# (B, H, Nq, Nk, d): one row, odd widths, tiles that are not full, few queries, wide heads, many strips
# of keys for warps that share them, many tiles for blocks that take one after the other
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 2, 1, 300, 32),
    (1, 2, 150, 9, 64),
    (2, 1, 7, 40, 33),
    (2, 3, 63, 63, 24),
    (1, 2, 123, 123, 80),
    (1, 4, 257, 257, 32),
    (1, 1, 130, 1000, 64),
    (1, 2, 200, 333, 128),
    (1, 1, 40, 64, 256),
    (1, 64, 16, 700, 256),
    (1, 1, 65, 129, 200),
    (3, 2, 129, 129, 96),
    (1, 1, 1025, 1025, 16),
    (2, 140, 300, 300, 32),
]
ROWS = [(name, dtype) for name, kernel in KERNELS.items() for dtype in kernel.dtypes]
if not torch.cuda.is_available():  # one is skipped for all
    ROWS = ROWS[:1]
TOLERANCES = {Dtype.FP32: 1e-5, Dtype.BF16: 2e-2, Dtype.FP16: 2e-3}
TF32 = ("5", Dtype.FP32), ("split", Dtype.FP32)  # split from five queries on
LARGEST_TILE = 256  # queries, of any kernel


@pytest.fixture(params=ROWS, ids=lambda row: f"kernel{row[0]}-{row[1]}")
def row(request: pytest.FixtureRequest, gpu: Gpu) -> tuple[str, Dtype]:
    name, dtype = request.param
    if not KERNELS[name].runs_on(gpu.capability, dtype):
        pytest.skip(f"kernel {name} does not run on {gpu.name}")
    return name, dtype


def qkv(B, H, Nq, Nk, d, dtype=Dtype.FP32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype.torch_name)
    return tuple(torch.randn(B, H, n, d, generator=generator).to(kind).cuda() for n in (Nq, Nk, Nk))


def exact(q, k, v, causal, scale):
    return reference.attention(*(t.double() for t in (q, k, v)), causal=causal, scale=scale, return_lse=True)


def check(row, q, k, v, causal=False, scale=None):
    """Compare a kernel with float64. The output's peer is SDPA in the same dtype."""
    kernel, dtype = row
    out, lse = attention("part4", q, k, v, causal=causal, scale=scale, return_lse=True, kernel=kernel)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32) and out.is_contiguous()
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    expected, expected_lse = exact(q, k, v, causal, applied)
    mask = reference.seen(q.shape[2], k.shape[2], q.device) if causal else None
    sign = (applied > 0) - (applied < 0)  # SDPA's fast backends give NaN unless the scale is positive
    peer = F.scaled_dot_product_attention(sign * q, k, v, attn_mask=mask, scale=abs(applied) or 1.0)
    rounding = max(1e-6, oracle.score_rounding(q, k, applied))
    # SDPA subtracts a row's largest score, so its largest weight is exactly 1. Kernels 5 and 6 subtract an
    # earlier maximum, so that weight is rounded too, which shows where a row has one key or two.
    oracle.assert_close(out.float(), expected, peer.double(), max(dtype.rounding, rounding))
    oracle.assert_close(lse, expected_lse, expected_lse, 4 * rounding)
    assert torch.equal(out, attention("part4", q, k, v, causal=causal, scale=scale, kernel=kernel))


def test_awkward_shapes(row):
    for shape in SHAPES:
        for causal in (False, True) if shape[2] <= shape[3] else (False,):
            with naming(shape, causal):
                check(row, *qkv(*shape, row[1]), causal)


def test_random_cases(row):
    """A hundred of each kernel and dtype: thousands in all. Few widths, because each is compiled."""
    choose = random.Random(0)
    for seed in range(100):
        B, H, d = choose.randint(1, 3), choose.randint(1, 3), choose.choice([8, 30, 64, 104])
        Nq = choose.choice([1, 2, 17, 64, 65, 128, choose.randint(1, 400)])
        Nk = Nq + choose.choice([0, 1, 63, choose.randint(0, 400)])
        scale, causal = choose.choice([None, None, 0.0, 1.0, -0.5]), choose.random() < 0.5
        with naming(B, H, Nq, Nk, d, scale, causal):
            check(row, *qkv(B, H, Nq, Nk, d, row[1], seed), causal, scale)


def test_any_rules_together(row, tmp_path):
    (tmp_path / "mine.h").write_text(oracle.HEADER)
    kernel, dtype = row
    if not KERNELS[kernel].ruled:
        pytest.skip(f"kernel {kernel} has no rules")
    choose, side = random.Random(0), [None, 0, 1, 30, 100, 500]
    for seed in range(60):
        torch.manual_seed(seed)
        B, Hk, group, d = choose.randint(1, 2), choose.randint(1, 2), choose.choice([1, 2, 5]), 64
        Nq = choose.choice([1, 2, 17, 64, 129, choose.randint(1, 400)])
        more = choose.choice([0, 1, 63, 900, -50])  # fewer keys go with neither documents nor a causal mask
        Nk, H = max(1, Nq + more), Hk * group
        documents = torch.stack([torch.arange(Nk) // choose.randint(1, 99), torch.arange(Nk) * 7 % 3])
        options = dict(
            window=(choose.choice(side), choose.choice(side)),
            softcap=choose.choice([0.5, 3.0, 30.0]),
            alibi_slopes=torch.rand(H, device="cuda"),
            sinks=torch.randn(H, device="cuda"),
            documents=documents[[choose.randint(0, 1) for _ in range(B)]].cuda(),
            bias=oracle.a_bias(choose, B, H, Nq, Nk).detach(),
            score_mod=tmp_path / "mine.h",
        )
        able = [name for name in options if more >= 0 or name != "documents"]
        given = {name: options[name] for name in able if choose.random() < 0.4}
        q, _, _ = qkv(B, H, Nq, Nk, d, dtype, seed)
        _, k, v = qkv(B, Hk, Nq, Nk, d, dtype, seed + 1)
        causal = choose.random() < 0.5 and more >= 0
        with naming(B, Hk, H, Nq, Nk, causal, given):
            out, lse = attention("part4", q, k, v, causal=causal, kernel=kernel, return_lse=True, **given)
            wide = [t.double() for t in (q, k, v)]
            about = dict(causal=causal, scale=d**-0.5, return_lse=True, rules=checked(given, q, Nk))
            (right, right_lse), (peer, _) = (reference.attention(*t, **about) for t in (wide, (q, k, v)))
            some, far = right_lse.isfinite(), q.float().norm(dim=3).max() * k.float().norm(dim=3).max() / 8
            assert torch.equal(lse.isfinite(), some)
            if dtype is Dtype.FP32:
                rounding = max(1e-6, oracle.score_rounding(q, k.repeat_interleave(group, 1), d**-0.5))
                oracle.assert_close(out, right, peer, rounding)
                if some.any():
                    oracle.assert_close(lse[some], right_lse[some], right_lse[some], 4 * rounding)
                continue
            # tanh.approx errs by 2^-11 of it
            error = TOLERANCES[dtype] + 2**-11 * min(given.get("softcap", 0), far.item())
            torch.testing.assert_close(out.double(), right, rtol=error, atol=error * v.abs().max().item())
            torch.testing.assert_close(lse[some].double(), right_lse[some], rtol=error, atol=error)


def test_a_saved_header_is_compiled_again(row, tmp_path):
    kernel, dtype = row
    if not KERNELS[kernel].ruled:
        pytest.skip(f"kernel {kernel} has no rules")
    q, k, v = qkv(1, 2, 40, 50, 32, dtype)
    for scale in (1.0, -2.0, 1.0):
        (tmp_path / "mine.h").write_text(f"float score(float s, At) {{ return {scale}f * s; }}")
        got = attention("part4", q, k, v, kernel=kernel, score_mod=tmp_path / "mine.h")
        expected = attention("part4", q, k, v, kernel=kernel, scale=scale * 32**-0.5)
        torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_strides(row):
    kernel, dtype = row
    q, k, v = qkv(2, 3, 70, 70, 40, dtype)
    expected = attention("part4", q, k, v, causal=True, kernel=kernel)
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], dim=2)  # (B, N, 3 H d)
    views = [t.view(2, 70, 3, 40).transpose(1, 2) for t in fused.split(120, dim=2)]
    columns = [t.mT.contiguous().mT for t in (q, k, v)]
    every_other = [torch.stack([t, -t], dim=-1)[..., 0] for t in (q, k, v)]
    odd = [torch.nn.functional.pad(t, (0, 1))[..., :40] for t in (q, k, v)]  # rows begin at odd addresses
    shifted = [torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view_as(t) for t in (q, k, v)]
    for given in (views, columns, every_other, odd, shifted):
        assert torch.equal(attention("part4", *given, causal=True, kernel=kernel), expected)
    beside = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    out, held = (
        attention("part4", *given, causal=True) for given in (beside, [t.requires_grad_() for t in (q, k, v)])
    )
    assert out.transpose(1, 2).is_contiguous() and held.is_contiguous() and torch.equal(out, held)
    gradients = [
        torch.autograd.grad(o.square().sum(), given) for o, given in ((out, beside), (held, (q, k, v)))
    ]
    assert all(map(torch.equal, *gradients))
    one_head = [t[:, :1].expand(2, 3, 70, 40) for t in (q, k, v)]  # stride 0
    held = [t.contiguous() for t in one_head]
    got, expected = (attention("part4", *given, causal=True, kernel=kernel) for given in (one_head, held))
    assert torch.equal(got, expected)


def test_scores_of_1e4(row):
    q, k, v = qkv(1, 2, 65, 65, 32)
    s = q @ k.mT
    kind = getattr(torch, row[1].torch_name)
    q = q * (1e4 / s.abs().max())
    for causal in (False, True):
        with naming(causal):
            check(row, q.to(kind), k.to(kind), v.to(kind), causal, scale=1.0)


def test_a_bad_value_reaches_the_rows_that_see_it_and_at_most_their_tile(row):
    kernel, dtype = row
    N, at, d = 700, 600, 32
    clean = qkv(1, 1, N, N, d, dtype)
    before = attention("part4", *clean, causal=True, kernel=kernel)
    close = dict(rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    for which, value in ((which, value) for which in "qkv" for value in (math.nan, math.inf)):
        with naming(which, value):
            tensors = {name: t.clone() for name, t in zip("qkv", clean)}
            tensors[which][0, 0, at, 3] = value
            out = attention("part4", *tensors.values(), causal=True, kernel=kernel)
            q, k, v = (t.cpu() for t in tensors.values())
            expected, _ = oracle.attention(q[:, :, at:], k, v, True, d**-0.5)  # of the rows that see it
            seen = out[:, :, at:].cpu().double()
            if row in TF32 and value == math.inf:  # its parts are infinite and NaN
                assert not seen[~expected.isfinite()].isfinite().any()
            else:
                torch.testing.assert_close(seen, expected, **close, equal_nan=True)
            if which == "q":  # its row only
                out[:, :, at] = before[:, :, at]
                torch.testing.assert_close(out, before, **close)
            far = at - LARGEST_TILE  # tiles before that of the first row that sees it
            torch.testing.assert_close(out[:, :, :far], before[:, :, :far], **close)


def test_what_lies_beyond_the_tensors_never_counts(row):
    """Rows and columns after the last ones are NaN in memory."""
    kernel, dtype = row
    for N in (1, 100, 130):
        for d in (32, 40):
            tensors = qkv(1, 2, N, N, d, dtype)
            views = [F.pad(t, (0, 64 - d, 0, 300), value=math.nan)[:, :, :N, :d] for t in tensors]
            for causal in (False, True):
                with naming(N, d, causal):
                    got, expected = (
                        attention("part4", *each, causal=causal, kernel=kernel) for each in (views, tensors)
                    )
                    assert torch.equal(got, expected)


def test_rows_whose_scores_are_minus_infinity(row):
    kernel, dtype = row
    q, k, v = qkv(1, 1, 3, 300, 16, dtype)
    q = torch.ones_like(q)
    k[:, :, :200] = -math.inf
    out, lse = attention("part4", q, k, v, return_lse=True, kernel=kernel)
    if row == ("5", Dtype.FP32):  # its parts of tf32 are infinite and NaN
        assert out.isnan().all() and lse.isnan().all()
        return
    finite = q, k[:, :, 200:], v[:, :, 200:]
    expected, expected_lse = attention("part4", *finite, return_lse=True, kernel=kernel)
    torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(lse, expected_lse)
    k[:] = -math.inf
    out, lse = attention("part4", q, k, v, return_lse=True, kernel=kernel)
    assert out.isnan().all() and bool((lse == -math.inf).all())


def test_many_heads(row):
    """More heads than a grid's second dimension may have."""
    kernel, dtype = row
    q, k, v = qkv(1, 1, 2, 3, 8, dtype)
    many = [t.expand(70_000, 1, *t.shape[2:]) for t in (q, k, v)]
    out = attention("part4", *many, kernel=kernel)
    assert torch.equal(out, attention("part4", q, k, v, kernel=kernel).expand_as(out))


def test_more_than_2_31_numbers(row):
    """Keys whose batches are 2^31 numbers apart, and more rows of queries than that."""
    kernel, dtype = row
    kind, far, d = getattr(torch, dtype.torch_name), 2**31 + 64, 64
    if torch.cuda.mem_get_info()[0] < 5 * far * dtype.bytes:
        pytest.skip("the GPU has too little free memory")
    held = torch.empty(far + 2**16, dtype=kind, device="cuda")
    k = held.as_strided((2, 1, 300, d), (far, 0, d, 1))
    v = held.as_strided((2, 1, 300, d), (far, 0, d, 1), 2**15)
    q, new_k, new_v = qkv(2, 1, 5, 300, d, dtype)
    k.copy_(new_k), v.copy_(new_v)
    out, expected = (attention("part4", q, *given, kernel=kernel) for given in ((k, v), (new_k, new_v)))
    assert torch.equal(out, expected)
    del held, k, v
    rows = far // d // 2
    q = torch.zeros(2, 1, rows, d, dtype=kind, device="cuda")
    last = qkv(2, 1, 200, 7, d, dtype)
    q[:, :, -200:] = last[0]
    out = attention("part4", q, *last[1:], kernel=kernel)
    expected = attention("part4", *last, kernel=kernel)
    torch.testing.assert_close(out[:, :, -200:], expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_opcheck(row):
    kernel, dtype = row
    for lse in (False, True):
        q, k, v = qkv(1, 2, 40, 50, 32, dtype)
        torch_library.opcheck(operator("part4", "cuda", lse=lse), (q, k, v, True, 0.3, kernel))


def test_compiles_without_a_graph_break(row):
    kernel, dtype = row
    q, k, v = qkv(1, 2, 40, 40, 32, dtype)

    def layer(q, k, v):
        return attention("part4", q * 2, k, v, causal=True, kernel=kernel) + 1

    expected = layer(q, k, v)
    torch.compiler.reset()  # each kernel and dtype would count as compiling the same code again
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v), expected)


def test_is_captured_in_a_graph(row):
    kernel, dtype = row
    q, k, v = qkv(2, 2, 130, 130, 64, dtype)
    attention("part4", q, k, v, causal=True, kernel=kernel)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention("part4", q, k, v, causal=True, kernel=kernel)
    others = qkv(2, 2, 130, 130, 64, dtype, seed=1)
    for held, new in zip((q, k, v), others):
        held.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attention("part4", *others, causal=True, kernel=kernel))


def test_uses_the_current_stream_and_does_not_wait(row):
    kernel, dtype = row
    q, k, v = qkv(1, 2, 130, 130, 64, dtype)
    expected = attention("part4", q, k, v, kernel=kernel)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4_000_000_000)  # seconds
            copies = [t.clone() for t in (q, k, v)]  # ready only after the sleep
            outs.append(attention("part4", *copies, kernel=kernel))
            assert not stream.query()  # the call came back while the stream still sleeps
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_a_second_device(row):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    kernel, dtype = row
    q, k, v = qkv(1, 2, 130, 130, 64, dtype)
    expected = attention("part4", q, k, v, kernel=kernel)
    got = attention("part4", *(t.to("cuda:1") for t in (q, k, v)), kernel=kernel)
    assert got.device.index == 1 and torch.equal(got.cpu(), expected.cpu())
    with pytest.raises(ValueError, match="k is on cuda:1; it must be on q's cuda:0"):
        attention("part4", q, k.to("cuda:1"), v)


def as_a_t4(dtype):
    """What a T4 runs: code of compute capability 7.5, which the driver compiles again for this GPU."""
    made = []

    def make(source):
        made.append(source.arch)
        return source.compile("ptx")[0] + b"\0"

    torch.zeros(1, device="cuda")  # makes the GPU's context current
    driver.gpu = lambda index: Gpu("T4", (7, 5), 64 * 1024, 40)
    nvrtc.Source.make = make
    shapes = (64, 1, 700), (64, 4, 700), (32, 123, 123), (64, 130, 300), (200, 63, 63), (256, 130, 300)
    for d, Nq, Nk in shapes:
        for causal in (False, True):
            with naming(d, Nq, Nk, causal):
                check((None, dtype), *qkv(1, 2, Nq, Nk, d, dtype), causal)
    assert len(made) == len(shapes) and set(made) == {"sm_75"}, made


@pytest.mark.full
@pytest.mark.parametrize("dtype", Dtype, ids=str)
def test_what_a_t4_runs(gpu, dtype):
    """In a process of its own, which has no other kernels."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    printed(sys.executable, __file__, dtype, PYTHONPATH=path)


def test_the_default_step_and_part0(gpu):
    for dtype in Dtype:
        for shape in ((1, 2, 130, 130, 32), (2, 2, 1, 9000, 64)):
            with naming(dtype, shape):
                q, k, v = qkv(*shape, dtype)
                check((None, dtype), q, k, v, causal=True)
                out, expected = (attention(part, q, k, v, causal=True) for part in ("part4", "part0"))
                torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


if __name__ == "__main__":
    as_a_t4(Dtype(sys.argv[1]))
