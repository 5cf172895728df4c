"""The gradients of part4 against the float64 oracle, and their contract in PyTorch."""

import math

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import naming
from torch import library as torch_library

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.extension import load
from shakespeare.attention_ext.parts import PARTS
from shakespeare.lab.correctness import allocated

pytestmark = pytest.mark.usefixtures("extension")

SHAPES = [*oracle.SHAPES, (1, 1, 2, 3000, 8)]


def inputs(B, H, Nq, Nk, d, seed=0):
    """q, k, v, dout and dlse."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(B, H, Nq, d), (B, H, Nk, d), (B, H, Nk, d), (B, H, Nq, d), (B, H, Nq)]
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def gradients(part, q, k, v, dout, dlse, causal=False, scale=None):
    """dq, dk and dv by a part; without dlse those of its output alone."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = attention(part, *leaves, causal=causal, scale=scale, return_lse=True)
    results, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return torch.autograd.grad(results, leaves, given)


def expected(q, k, v, dout, dlse, causal, scale):
    """dq, dk and dv in float64, by PyTorch from the oracle's definition."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = oracle.attention(*leaves, causal, scale)
    return list(torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double())))


def check(q, k, v, dout, dlse, causal=False, scale=None):
    """Compare part4's gradients with the oracle's; part0's float32 error is the measure.

    P comes from a score and from its row's logsumexp, each of which is rounded.
    """
    got = gradients("part4", q, k, v, dout, dlse, causal, scale)
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    right = expected(q, k, v, dout, dlse, causal, applied)
    peers = gradients("part0", q, k, v, dout, dlse, causal, scale)
    floor = max(1e-6, 2 * oracle.score_rounding(q, k, applied))
    for mine, exact, peer in zip(got, right, peers):
        oracle.assert_close(mine, exact, peer, floor)


def test_awkward_shapes():
    for shape in SHAPES:
        for causal in (False, True):
            with naming(shape, causal):
                check(*inputs(*shape), causal)
    check(*inputs(1, 2, 150, 9, 16))  # more queries than keys


SIZES = dict(Nq=st.integers(1, 150), more=st.integers(0, 150), d=st.integers(1, 70))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(**SIZES, causal=st.booleans(), scale=st.sampled_from([None, 0.0, 1.0, -0.5]))
def test_any_size(Nq, more, d, causal, scale):
    check(*inputs(1, 2, Nq, Nq + more, d), causal, scale)


def test_strides():
    q, k, v, dout, dlse = inputs(2, 3, 70, 70, 24)
    right = gradients("part4", q, k, v, dout, dlse, True)
    for tensors in oracle.strided(q, k, v, dout).values():
        assert not tensors[0].is_contiguous()
        held = torch.stack([dlse, -dlse], dim=-1)[..., 0]
        assert all(map(torch.equal, gradients("part4", *tensors, held, True), right))


def test_expanded_tensors():
    """One head for all, as with copies of it. The gradient of a sum is expanded too."""
    q, k, v, _, _ = inputs(2, 3, 70, 70, 24)
    results = []
    for copied in (False, True):
        leaves = [t[:, :1].clone().requires_grad_() for t in (q, k, v)]
        many = [t.expand(2, 3, 70, 24) for t in leaves]
        given = [t.contiguous() for t in many] if copied else many
        attention("part4", *given, causal=True).sum().backward()
        results.append([t.grad for t in leaves])
    assert all(map(torch.equal, *results))


def test_scores_of_1e4():
    q, k, v, dout, dlse = inputs(1, 2, 65, 65, 32)
    for causal in (False, True):
        check(q * (1e4 / (q @ k.mT).abs().max()), k, v, dout, dlse, causal, scale=1.0)


def test_scores_whose_logsumexp_is_rounded_by_more_than_one():
    """P is at most 1, whatever the scores: 2^(S - lse) would be infinite."""
    q, k, v, dout, dlse = inputs(1, 1, 40, 40, 8)
    grads = gradients("part4", 1e9 * q, k, v, dout, dlse, scale=1.0)
    assert all(t.isfinite().all() for t in grads)
    assert float(grads[2].abs().max()) <= float(dout.abs().sum())


def test_threads_change_nothing(threads):
    for shape in ((2, 3, 90, 90, 16), (1, 1, 700, 700, 8), (1, 2, 3, 2500, 8)):
        tensors = inputs(*shape)
        threads(1)
        right = gradients("part4", *tensors, True)
        for count in (2, 3, 16):
            threads(count)
            assert all(map(torch.equal, gradients("part4", *tensors, True), right)), (shape, count)


def test_a_nan_reaches_what_depends_on_it():
    for which, name in enumerate("q k v dout dlse".split()):
        tensors = inputs(1, 2, 100, 100, 8)
        clean = gradients("part4", *tensors, causal=True)
        tensors[which][(0, 1, 70, 3)[: tensors[which].dim()]] = math.nan
        got = gradients("part4", *tensors, causal=True)
        for mine, exact, before in zip(got, expected(*tensors, True, 8**-0.5), clean):
            assert mine[exact.isnan()].isnan().all(), name
            assert torch.equal(mine[0, 0], before[0, 0]), name  # the other head
        # the first queries are of another tile than the NaN
        assert torch.equal(got[0][0, 1, :6], clean[0][0, 1, :6]), name


def test_scratch_does_not_grow_with_the_length(threads):
    threads(3)
    taken = []
    for N in (300, 900):
        q, k, v, dout, dlse = inputs(1, 4, N, N, 16)
        out, lse = attention("part4", q, k, v, return_lse=True)
        backward = load().part4_backward
        _, bytes_taken = allocated(lambda: backward(dout, dlse, q, k, v, out, lse, True, 0.25))
        taken.append(bytes_taken - 4 * (q.numel() + k.numel() + v.numel()))
    assert taken[0] == taken[1] > 0


def test_one_result_or_one_input_alone():
    q, k, v, dout, dlse = inputs(1, 2, 30, 40, 8)
    right = gradients("part4", q, k, v, dout, torch.zeros_like(dlse), True)
    assert all(map(torch.equal, gradients("part4", q, k, v, dout, None, True), right))
    both = gradients("part4", q, k, v, dout, dlse, True)
    for which in range(3):
        tensors = [q, k, v]
        tensors[which] = tensors[which].clone().requires_grad_()
        out, lse = attention("part4", *tensors, causal=True, return_lse=True)
        torch.autograd.backward((out, lse), (dout, dlse))
        assert torch.equal(tensors[which].grad, both[which])
    q = q.clone().requires_grad_()
    _, lse = attention("part4", q, k, v, return_lse=True)
    (of_lse,) = torch.autograd.grad(lse, q, dlse)
    exact = expected(q, k, v, torch.zeros_like(dout), dlse, False, 8**-0.5)[0]
    torch.testing.assert_close(of_lse.double(), exact, rtol=1e-5, atol=1e-6)


def test_nothing_is_saved_without_gradients():
    q, k, v = (t.requires_grad_() for t in inputs(1, 2, 30, 30, 8)[:3])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = attention("part4", q, k, v)
            assert out.grad_fn is None and not out.requires_grad and not saved
        assert attention("part4", q, k, v).grad_fn is not None and len(saved) == 5


def test_a_second_backward_pass():
    q, k, v, dout, _ = inputs(1, 2, 30, 30, 8)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention("part4", *leaves)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, dout, retain_graph=True), first))
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    assert torch.equal(dq, first[0])
    with pytest.raises(RuntimeError, match="^part4 has no second gradient; only part0 has$"):
        dq.sum().backward()


@pytest.mark.full
def test_opcheck_and_compiling_without_a_graph_break():
    q, k, v, dout, dlse = inputs(1, 2, 20, 30, 8)
    out, lse = attention("part4", q, k, v, causal=True, return_lse=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    for tensors in (leaves, (q, k, v)):
        operator = getattr(load(), PARTS["part4"].gradient).default
        torch_library.opcheck(operator, (*tensors, True, 0.3, 8, 16))
    backward = load().part4_backward.default
    for of_lse in (dlse, torch.empty(0)):
        torch_library.opcheck(backward, (dout, of_lse, q, k, v, out, lse, True, 0.3))
        views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dout, q, k, v)]
        torch_library.opcheck(backward, (views[0], of_lse, *views[1:], out, lse, True, 0.3))

    def layer(q, k, v):
        out, lse = attention("part4", q * 2, k, v, causal=True, return_lse=True)
        return out + 1, lse

    def run(layer):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(layer(*leaves), leaves, (dout, dlse))

    right = run(layer)  # builds the extension, which torch.compile cannot do
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), right)


def test_what_has_no_gradient_says_so():
    for part in ("part1", "part2", "part3"):
        q, k, v, _, _ = inputs(1, 1, 4, 4, 8)
        with pytest.raises(ValueError, match=f"^part is '{part}'; it must be part0 or part4 for gradients"):
            attention(part, q, k.requires_grad_(), v)
        with torch.no_grad():
            assert not attention(part, q, k, v).requires_grad
    q, k, v = (t.bfloat16().requires_grad_() for t in inputs(1, 1, 4, 4, 8)[:3])
    with pytest.raises(
        ValueError, match="^part is 'part4'; it must be part0 for gradients in bf16 on the CPU"
    ):
        attention("part4", q, k, v)
    assert attention("part0", q, k, v).requires_grad


def test_wrong_tensors_are_named_by_the_operator():
    q, k, v, dout, dlse = inputs(1, 2, 20, 30, 8)
    out, lse = attention("part4", q, k, v, return_lse=True)
    right = dict(dout=dout, dlse=dlse, q=q, k=k, v=v, out=out, lse=lse, causal=False, scale=1.0)
    for change, message in (
        (dict(dout=dout.double()), "dout must be float32 on the CPU"),
        (dict(dout=dout[:, :, 1:]), r"dout has shape \(1, 2, 19, 8\); it must be \(1, 2, 20, 8\)"),
        (dict(lse=lse[:, :, 1:]), r"lse has shape \(1, 2, 19\); it must be \(1, 2, 20\)"),
        (dict(k=k[:, :, :9], v=v[:, :, :9], causal=True), "q has Nq=20; with causal it must be at most"),
    ):
        with pytest.raises(RuntimeError, match=message):
            load().part4_backward(**right | change)


def test_torch_func_transforms_it():
    """grad, jacrev, vmap and vmap(grad), with and without rules, beside part0's."""
    shape = (3, 2, 4, 9, 8)  # the first dimension is mapped
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    k, v = k[:, :, :2], v[:, :, :2]
    sinks, slopes = torch.randn(3, 4, generator=generator), torch.rand(4, generator=generator)
    documents = torch.arange(9).expand(2, 9) // 5
    bias = torch.randn(3, 1, 4, 9, 9, generator=generator)
    cases = (
        ({}, {}),
        ({}, {"window": (3, 0), "softcap": 2.0, "alibi_slopes": slopes, "documents": documents}),
        ({"sinks": sinks}, {}),
        ({"bias": bias}, {"sinks": sinks[0]}),
    )
    for mapped, fixed in cases:
        with naming(*mapped, *fixed):

            def results(part, fixed=fixed, mapped=mapped):
                def attend(q, k, v, *mapped_values):
                    rules = dict(zip(mapped, mapped_values)) | fixed
                    return attention(part, q, k, v, causal=True, **rules)

                def loss(*tensors):
                    return attend(*tensors).square().sum()

                tensors = (q, k, v, *mapped.values())
                leaves = tuple(range(len(tensors)))
                first = tuple(t[0] for t in tensors)
                yield torch.vmap(attend)(*tensors)
                yield torch.vmap(attend, in_dims=(0, None, None, *(0 for _ in mapped)))(
                    q, k[0], v[0], *mapped.values()
                )
                yield from torch.func.grad(loss, leaves)(*first)
                yield from torch.vmap(torch.func.grad(loss, leaves))(*tensors)
                yield from torch.func.grad(lambda *t: torch.vmap(attend)(*t).square().sum(), leaves)(*tensors)
                yield torch.func.jacrev(lambda q: attend(q, *first[1:])[0, 0, :2])(first[0])

            for got, must in zip(results("part4"), results("part0"), strict=True):
                torch.testing.assert_close(got, must, rtol=1e-4, atol=1e-5)


def test_torch_func_is_told_what_only_part0_has():
    q, k, v = torch.randn(3, 2, 2, 5, 8)
    loss = lambda q, part="part4": attention(part, q, k, v).sum()  # noqa: E731
    second = lambda q: torch.func.grad(loss)(q).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="^part4 has no second gradient; only part0 has$"):
        torch.func.grad(second)(q)
    for forward in (lambda: torch.func.jvp(loss, (q,), (q,)), lambda: torch.func.jacfwd(loss)(q)):
        with pytest.raises(RuntimeError, match="^part4 has no forward-mode gradient; only part0 has$"):
            forward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="only part0 has$"):
        loss(torch.autograd.forward_ad.make_dual(q, q))
    with pytest.raises(ValueError, match="part is 'part2'; it must be part0 or part4 for gradients"):
        torch.vmap(lambda q: attention("part2", q[None], k[:1], v[:1]))(q)
