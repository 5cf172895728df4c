"""attention()'s gradients on a GPU against float64, in each dtype, over generated cases."""

import random

import oracle
import pytest
import torch
from support import naming
from torch import library as torch_library
from torch.nn import functional as F

from shakespeare.attention_ext import attention, operator, reference
from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.rules import Rules, checked

FLOOR = (
    2e-6  # a share of the numbers that a gradient sums, added to twice PyTorch's error: dS is a difference
)


OF_RULES = ("sinks", "bias")  # rules with gradients


@pytest.fixture(params=Dtype, ids=str)
def dtype(request, gpu):
    return request.param


def tensors(dtype, B, H, Hk, Nq, Nk, d, seed=0):
    """q, k, v and dout; in half of the cases views of (B, N, H, d)."""
    generator, kind = torch.Generator().manual_seed(seed), getattr(torch, dtype.torch_name)
    shapes = (B, H, Nq, d), (B, Hk, Nk, d), (B, Hk, Nk, d), (B, H, Nq, d)
    made = [torch.randn(shape, generator=generator).to(kind).cuda() for shape in shapes]
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made] if seed % 4 > 1 else made


def documents(choose, Nk):
    """Numbers (Nk,): of even or uneven lengths, or some that do not grow."""
    keys = torch.arange(Nk)
    ends = torch.tensor(choose.choices(range(Nk), k=choose.choice([1, 3, 30])))
    return choose.choice([keys // choose.randint(1, 99), (keys[:, None] >= ends).sum(1), keys * 7 % 3])


def gradients(given, dlse, rules=None, part4=True, **options):
    """Those of q, k, v, sinks and bias, by autograd. dlse: or None. rules: attention()'s options."""
    q, k, v = (t.detach().requires_grad_() for t in given[:3])
    rules = rules or {}
    if part4:
        out, lse = attention("part4", q, k, v, return_lse=True, **options, **rules)
    else:
        found = checked(rules, q, k.shape[2]) if rules or k.shape[1] < q.shape[1] else None
        out, lse = reference.attention(q, k, v, return_lse=True, rules=found, **options)
    of_lse = () if dlse is None else (lse.masked_fill(~lse.isfinite(), 0.0),)
    leaves = [q, k, v, *(t for t in map(rules.get, OF_RULES) if t is not None and t.requires_grad)]
    return torch.autograd.grad((out, *of_lse), leaves, (given[3], *(dlse.to(t.dtype) for t in of_lse)))


@pytest.mark.parametrize("first", range(5))  # each set of rules is compiled: processes share the cases
@pytest.mark.parametrize("ruled", [False, True], ids=["plain", "rules"])
def test_generated_cases(dtype, ruled, first, tmp_path):
    (tmp_path / "mine.h").write_text(oracle.HEADER)
    for seed in range(first, 60, 5):
        torch.manual_seed(seed)
        choose, rules = random.Random(seed), {}
        B, Hk = choose.randint(1, 2), choose.randint(1, 3)
        d = choose.choice([16, 40, 64, 80, 128, 136, 192, 200, 256])
        H = Hk * choose.choice([1, 2, 3]) if ruled else Hk
        d = [64, 256][seed % 2] if ruled else d
        Nq, causal = choose.choice([1, 17, 64, 129, choose.randint(1, 400)]), choose.random() < 0.5
        Nk = Nq + choose.choice([0, 0, 1, 63, choose.randint(0, 400)])
        if not causal and not ruled and choose.random() < 0.3:
            Nq, Nk = Nk, Nq
        if ruled:
            side = [None, 0, 30, 500]
            rules = dict(window=tuple(choose.choices(side, k=2)), softcap=choose.choice([0.5, 30.0]))
            rules |= dict(alibi_slopes=torch.rand(H).cuda(), sinks=torch.randn(H).cuda().requires_grad_())
            rules |= dict(documents=torch.stack([documents(choose, Nk) for _ in range(B)]).cuda())
            rules |= dict(bias=oracle.a_bias(choose, B, H, Nq, Nk), score_mod=tmp_path / "mine.h")
            rules = {name: rules[name] for name in rules if choose.random() < 0.5}
        scale = choose.choice([d**-0.5, d**-0.5, 0.2, -0.1])
        given = tensors(dtype, B, H, Hk, Nq, Nk, d, seed)
        about = dict(dlse=torch.randn(B, H, Nq).cuda() if seed % 2 else None, causal=causal, scale=scale)
        with naming(seed, (B, H, Hk, Nq, Nk, d), about, rules):
            got, again = (gradients(given, rules=rules, **about) for _ in range(2))
            assert all(map(torch.equal, got, again))
            exact = gradients([t.double() for t in given], rules=rules, part4=False, **about)
            peer = gradients(given, rules=rules, part4=False, **about)
            q, k, v, dout = (t.float() for t in given)
            dP = dout.norm(dim=3).max() * v.std()
            scales = [dP * k.abs().max() * abs(scale), dP * q.abs().max() * abs(scale), dout.abs().max()]
            for n, (ours, right, theirs) in enumerate(zip(got, exact, peer)):
                # a sink's sums all rows, a bias's those of batches and heads that share it
                most = scales[n] if n < 3 else dP * (B * max(H, Nq)) ** 0.5
                floor = max(FLOOR, dtype.rounding) * max(most, right.abs().max())
                error, allowed = (ours - right).abs().max(), 2 * (theirs - right).abs().max() + floor
                assert error <= allowed, (n, float(error), float(allowed))


def test_opcheck_and_compile(dtype):
    *leaves, dout = tensors(dtype, 1, 2, 2, 40, 50, 32)
    leaves = [t.requires_grad_() for t in leaves]
    torch_library.opcheck(operator("part4", "cuda", gradient=True), (*leaves, True, 0.3, None))

    def layer(q, k, v):
        return attention("part4", q * 2, k, v, causal=True) + 1

    bias = torch.randn(1, 2, 40, 50, device="cuda", requires_grad=True)
    more = (True, 0.3, None, *Rules(bias=bias).on_cuda().arguments())
    torch_library.opcheck(operator("part4", "cuda", gradient=True, ruled=True), (*leaves, *more))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    right, got = (torch.autograd.grad(f(*leaves), leaves, dout) for f in (layer, compiled))
    torch.testing.assert_close(got, right)


def test_what_lies_beyond_the_tensors_never_counts(dtype):
    for N, d in ((1, 32), (100, 40), (130, 64)):
        given = tensors(dtype, 1, 2, 2, N, N, d)
        views = [F.pad(t, (0, 24, 0, 300), value=torch.nan)[:, :, :N, :d] for t in given]
        expected, got = (gradients(each, None, causal=True) for each in (given, views))
        assert all(map(torch.equal, got, expected))
