"""shakespeare.flash_attn: flash-attn's functions against their definition in float64."""

from __future__ import annotations

import importlib
import sys

import oracle
import pytest
import torch
from support import or_skip

from shakespeare import flash_attn
from shakespeare.attention_ext import extension
from shakespeare.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

H, HK, D = 4, 2, 16


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    with or_skip():
        extension.load()


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.06])
RULES = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3, "softcap": 1.5, "causal": True},
    {"window_size": (5, 2)},
    {"window_size": (-1, 3)},
    {"window_size": (4, -1)},
    {"window_size": (3, 7), "causal": True},
    {"window_size": (-1, 0)},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES)), "causal": True, "softcap": 2.0},
]
SIZES = [(7, 7), (3, 21), (21, 3), (1, 9), (40, 33), (130, 140)]


def defined(q, k, v, softmax_scale=None, window_size=(-1, -1), **rules):
    """Output (B, Sq, H, d) and logsumexp (B, H, Sq) in float64; that of a row without keys is inf."""
    heads = (t.double().transpose(1, 2) for t in (q, k, v))
    window = [side if side >= 0 else None for side in window_size]
    out, lse = oracle.defined(*heads, window=window, scale=softmax_scale, **rules)
    return out.transpose(1, 2), lse.masked_fill(lse == -torch.inf, torch.inf)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return request.param


def tensors(*sizes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).to(device, dtype) for size in sizes]


def rules_on(device):
    """RULES, with slopes on the device."""
    return [{name: on(device, value) for name, value in rules.items()} for rules in RULES]


def on(device, value):
    """A value that may be a tensor, on the device."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


def qkv(Nq, Nk, B=2, **options):
    return tensors((B, Nq, H, D), (B, Nk, HK, D), (B, Nk, HK, D), **options)


def close(got, expected, dtype=torch.float32, times=1):
    tolerance = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype] * times
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rule_and_length_is_flash_attns(dtype, device):
    for rules in rules_on(device):
        for Nq, Nk in SIZES:
            q, k, v = (t.requires_grad_() for t in qkv(Nq, Nk, dtype=dtype, device=device))
            out, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **rules)
            must, must_lse = defined(q, k, v, **rules)
            assert out.is_contiguous() and not probabilities.numel()
            close(out, must, dtype)
            torch.testing.assert_close(
                lse.double(), must_lse, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 0.02
            )
            dout = torch.randn_like(out)
            for got, expected in zip(
                torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(must, (q, k, v), dout.double())
            ):
                close(got, expected, dtype, times=10)
            with torch.no_grad():
                close(flash_attn_func(q, k, v, deterministic=True, **rules), must, dtype)


def test_packed_tensors_and_empty_texts():
    q, k, v = qkv(9, 9)
    same = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True), same)
    q, k, v = tensors(*[(2, 9, H, D)] * 3)
    packed = torch.stack((q, k, v), 2)
    assert torch.equal(flash_attn_qkvpacked_func(packed, 0.0, 0.2), flash_attn_func(q, k, v, 0.0, 0.2))
    out, lse, _ = flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert not out.any() and lse.isinf().all() and (lse > 0).all()
    assert flash_attn_func(q[:, :0], k, v).shape == (2, 0, H, D)


def test_varlen_is_each_text_alone(device):
    for lengths_q, lengths_k, shared in (
        ([5, 0, 9, 1], [5, 0, 9, 1], True),
        ([5, 3, 0, 8], [7, 0, 4, 3], False),
        ([4], [4], True),
    ):
        for rules in rules_on(device):
            slopes = rules.get("alibi_slopes", SLOPES.to(device))
            if slopes.dim() == 2:
                rules = rules | {
                    "alibi_slopes": slopes[:1] * torch.arange(1, len(lengths_q) + 1, device=device)[:, None]
                }
            sizes = ((sum(lengths_q), H), *[(sum(lengths_k), HK)] * 2)
            q, k, v = tensors(*((n, h, D) for n, h in sizes), device=device)
            q, k, v = (t.requires_grad_() for t in (q, k, v))
            ends = [torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (lengths_q, lengths_k)]
            cu = (ends[0], ends[0] if shared else ends[1])
            most = (max(lengths_q), max(lengths_k))
            out, lse, _ = flash_attn_varlen_func(q, k, v, *cu, *most, return_attn_probs=True, **rules)
            texts = zip(*(t.split(n) for t, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))))
            musts = []
            for i, text in enumerate(texts):
                by_text = {"alibi_slopes": rules["alibi_slopes"][i]} if slopes.dim() == 2 else {}
                musts.append(defined(*(t[None] for t in text), **rules | by_text))
            must = torch.cat([must[0][0] for must in musts])
            close(out, must)
            close(lse, torch.cat([must[1][0] for must in musts], 1), times=20)
            assert out.is_contiguous() and lse.shape == (H, sum(lengths_q))
            dout = torch.randn_like(out)
            for got, expected in zip(
                torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(must, (q, k, v), dout.double())
            ):
                close(got, expected, times=10)
            kv = torch.stack((k, v), 1)
            torch.testing.assert_close(flash_attn_varlen_kvpacked_func(q, kv, *cu, *most, **rules), out)
    q, k, v = tensors(*[(6, H, D)] * 3, device=device)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    packed = flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), cu, 4, causal=True)
    close(packed, flash_attn_varlen_func(q, k, v, cu, cu.clone(), 4, 4, causal=True))


def test_a_cache_takes_new_keys_in_place(device):
    B, rows, S, new = 2, 3, 24, 3
    for rules in rules_on(device):
        for lengths in (
            10,
            torch.tensor([4, 15], dtype=torch.int32, device=device),
            torch.tensor([6, 6], dtype=torch.int32, device=device),
        ):
            for places in (None, torch.tensor([2, 0], dtype=torch.int32, device=device)):
                for leftpad in (None, torch.tensor([1, 3], dtype=torch.int32, device=device)):
                    q, k, v = qkv(new, new, device=device)
                    caches = tensors(
                        *[(rows if places is not None else B, S, HK, D)] * 2, device=device, seed=1
                    )
                    expected = [cache.clone() for cache in caches]
                    names = dict(cache_seqlens=lengths, cache_batch_idx=places, cache_leftpad=leftpad)
                    out, lse = flash_attn_with_kvcache(
                        q, *caches, k, v, **names, return_softmax_lse=True, **rules
                    )
                    for b in range(B):
                        row = b if places is None else places[b]
                        n = lengths if isinstance(lengths, int) else int(lengths[b])
                        first = 0 if leftpad is None else int(leftpad[b])
                        for cache, added in zip(expected, (k, v)):
                            cache[row, n : n + new] = added[b]
                        slopes = rules.get("alibi_slopes")
                        own = rules | (
                            {"alibi_slopes": slopes[b]} if slopes is not None and slopes.dim() == 2 else {}
                        )
                        must, must_lse = defined(
                            q[b : b + 1], *(t[row : row + 1, first : n + new] for t in expected), **own
                        )
                        close(out[b : b + 1], must)
                        close(lse[b : b + 1], must_lse, times=20)
                    assert all(map(torch.equal, caches, expected))
    q, k, v = qkv(1, S, dtype=torch.bfloat16, device=device)
    close(flash_attn_with_kvcache(q, k, v), defined(q, k, v)[0], torch.bfloat16)


def test_what_is_refused_names_the_argument():
    q, k, v = qkv(4, 4)
    rows = torch.randn(8, H, D)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    varlen = lambda *cu, **more: flash_attn_varlen_func(rows, rows, rows, *cu, 5, 5, **more)  # noqa: E731
    cache = lambda **more: flash_attn_with_kvcache(q, k, v, **more)  # noqa: E731
    for call, words in (
        (lambda: flash_attn_func(q, k, v, 0.1), "dropout_p is 0.1; it must be 0"),
        (lambda: flash_attn_func(q[0], k, v), r"q has shape \(4, 4, 16\); it must be \(B, S, H, d\)"),
        (lambda: flash_attn_func(q, k[:1], v[:1]), "k has shape .*; its B must be q's 2"),
        (
            lambda: flash_attn_func(q[:, :, :3], k, v),
            "k has shape .*; its d must be q's 16, its heads must divide q's 3",
        ),
        (lambda: flash_attn_func(q, k, v[..., :8]), "v has shape .*; it must be k's"),
        (lambda: flash_attn_func(q, k.half(), v), "k is torch.float16; it must be torch.float32"),
        (lambda: flash_attn_func(q.double(), k, v), "dtype is 'float64'; it must be"),
        (lambda: flash_attn_func(q, k, None), "v is a NoneType; it must be a tensor"),
        (
            lambda: flash_attn_func(q, k, v, window_size=3),
            r"window_size is an int; it must be \(left, right\)",
        ),
        (
            lambda: flash_attn_func(q, k, v, alibi_slopes=SLOPES[:3]),
            r"alibi_slopes has shape \(3,\); it must be",
        ),
        (lambda: flash_attn_qkvpacked_func(q), r"qkv has shape .*; it must be \(B, S, 3, H, d\)"),
        (lambda: varlen(cu.long(), cu), "cu_seqlens_q is torch.int64; it must be a tensor of torch.int32"),
        (lambda: varlen(cu, cu[:2]), r"cu_seqlens_k has shape \(2,\); it must be"),
        (lambda: varlen(cu + 1, cu), "cu_seqlens_q is 1 to 9; it must grow from 0 to at most the 8 rows"),
        (lambda: varlen(cu, cu, block_table=cu), "block_table is given; it must be None"),
        (lambda: cache(rotary_cos=q), "rotary_cos is given; it must be None"),
        (lambda: cache(k=k, v=v), "cache_seqlens is None; it must be given with k"),
        (lambda: cache(k=k, v=v, cache_seqlens=1), r"cache_seqlens is \[1, 1\]; it must be from 0 to 0"),
        (
            lambda: cache(cache_batch_idx=torch.tensor([0, 2])),
            r"cache_batch_idx is \[0, 2\]; it must be from 0 to 1",
        ),
        (
            lambda: cache(cache_seqlens=torch.tensor([1])),
            r"cache_seqlens has shape \(1,\); it must be \(2,\)",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()


def test_install_serves_programs_that_import_flash_attn(monkeypatch, tmp_path):
    for name in flash_attn.MODULES:
        monkeypatch.setitem(sys.modules, name, None)  # so that it is gone after the test
        del sys.modules[name]
    (tmp_path / "flash_attn.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash_attn is installed"):
        flash_attn.install()
    (tmp_path / "flash_attn.py").unlink()
    importlib.invalidate_caches()
    flash_attn.install()
    flash_attn.install()
    namespace: dict = {}
    exec(
        "import flash_attn.flash_attn_interface as interface\n"
        "from flash_attn import flash_attn_func, __version__\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n",
        namespace,
    )
    assert namespace["interface"].flash_attn_func is namespace["flash_attn_func"] is flash_attn_func
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    x = torch.arange(12.0).view(2, 3, 2)
    rows, places, cu, longest, lengths = namespace["unpad_input"](x, mask)
    assert (
        places.tolist() == [0, 1, 4, 5]
        and cu.tolist() == [0, 2, 4]
        and longest == 2
        and lengths.tolist() == [2, 2]
    )
    assert torch.equal(namespace["pad_input"](rows, places, 2, 3), x * mask[..., None])
    for name in flash_attn.MODULES:
        monkeypatch.delitem(sys.modules, name)


def test_torch_compile_takes_it_without_a_graph_break():
    def loss(q, k, v, cu):
        out = flash_attn_func(q, k, v, causal=True, window_size=(6, 0), softcap=3.0)
        texts = [t[0] for t in (q, k, v)]
        return out.sum() + flash_attn_varlen_func(*texts, cu, cu, 9, 9, causal=True).square().sum()

    fast = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (12, 17):
        q, k, v = (t.requires_grad_() for t in qkv(n, n))
        cu = torch.tensor([0, 3, n], dtype=torch.int32)
        for got, expected in zip(
            torch.autograd.grad(fast(q, k, v, cu), (q, k, v)),
            torch.autograd.grad(loss(q, k, v, cu), (q, k, v)),
        ):
            torch.testing.assert_close(got, expected)
