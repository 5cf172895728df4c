"""gpt.py try --backward: right gradients are right, planted mistakes are found and named, and the command."""

from pathlib import Path

import pytest
import torch
from planted import STARTS, Mistake, find
from support import full, naming

from shakespeare.attention_ext import reference
from shakespeare.attention_ext.build.recipes import CSRC
from shakespeare.judge import gradients
from shakespeare.judge.cases import CASES

NUMPY = """\
import numpy as np

TILE = 16


def attention_backward(q, k, v, out, lse, dout, causal, scale):
    Nk, dq, dk, dv = k.shape[2], np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    D = np.sum(dout * out, -1, keepdims=True)
    for j0 in range(0, Nk, TILE):
        at = np.s_[:, :, j0 : j0 + TILE]
        P = np.exp(np.float32(scale) * (q @ k[at].swapaxes(2, 3)) - lse[..., None])
        if causal:
            P = np.where(np.tri(*P.shape[2:], Nk - q.shape[2] - j0), P, np.float32(0))
        dS = np.float32(scale) * P * (dout @ v[at].swapaxes(2, 3) - D)
        dq += dS @ k[at]
        dk[at] = dS.swapaxes(2, 3) @ q
        dv[at] = P.swapaxes(2, 3) @ dout
    return dq, dk, dv
"""
CPP, TORCH = ((STARTS / f"start_backward.{end}").read_text() for end in ("cpp", "py"))
KERNELS = {"cpp": (".cpp", CPP), "torch": (".py", TORCH), "numpy": (".py", NUMPY)}
# fmt: off
# Name, kernel, what is replaced by what, and the kinds of the findings that name it.
MISTAKES = (
    ("no D", "cpp", "(dP - D)", "dP", "rowsum"),
    ("dq not scaled", "torch", "return dS @ k", "return dS / scale @ k", "scale"),
    ("S for P", "torch", "dv = P.mT @", "dv = S.masked_fill(S.isinf(), 0).mT @", "matrices"),
    ("no mask", "numpy", "if causal:", "if False:", "mask"),
    ("dk and dv", "torch", "dS.mT @ q, dv", "dv, dS.mT @ q", "matrices"),
    ("D not summed", "cpp", "D += dO", "D = dO", "rowsum"),
    ("dout's stride", "cpp", "lddO = a.dout.row_stride", "lddO = d", "strides"),
    ("dk in tiles", "numpy", "dq += dS", "dq = dS", "added"),
    ("q is scaled", "numpy", "    D = np", "    q *= scale\n    D = np", "inputs"),
    ("dK not cleared", "cpp", "std::fill_n(dK, Nk * d, 0.0f);", "", "leftover"),
    ("a column too far", "cpp", "c < d; c++) dK", "c <= d; c++) dK", "bounds"),
    ("beyond scratch", "cpp", "float*) {", "float* x) {\n    x[0] = 0;", "bounds"),
    ("no lse", "cpp", "s - lse[i]", "s", "sum"),
    ("keys in tiles", "numpy", "range(0, Nk, TILE)", "range(0, Nk // TILE * TILE, TILE)", "tail"),
    ("in bfloat16", "torch", "(q @ k.mT)", "(q.bfloat16() @ k.mT.bfloat16()).float()", "precision"),
    ("a shape", "torch", "dS.mT @ q, dv", "dS.mT @ q, dv[:, :1]", "raised"),
    ("an exception", "cpp", "float*) {", "float*) {\n    if (a.Nk > a.Nq) throw 1;", "raised"),
)
# fmt: on


@pytest.mark.parametrize("some", [("numpy",), full(("part4", "cpp", "torch"))])
def test_right_gradients_are_right(tried, some):
    part4 = (CSRC / "cpu" / "part4_backward.cpp").read_text()  # with scratch and threads
    part4 = part4.replace("flash_backward_scratch", "backward_scratch").replace("flash_b", "attention_b")
    for kernel in some:
        suffix, text = (KERNELS | {"part4": (".cpp", part4)})[kernel]
        with naming(kernel):
            found = tried(f"mine{suffix}", text, backward=True)
            assert found.right and found.tried == len(CASES), (found.finding, found.refused)


@pytest.mark.parametrize("some", [MISTAKES[:2], full(MISTAKES[2:])])
def test_mistakes_are_found_and_most_are_named(tried, some):
    find(tried, [Mistake(*row, KERNELS) for row in some], backward=True)


def test_the_formulas_are_the_gradients_of_the_output():
    """Beside PyTorch's automatic gradients, in float64."""
    for case in CASES[:20]:
        *given, _, _, dout = (torch.from_numpy(t.astype(float)) for t in gradients.inputs(case))
        leaves = [t.requires_grad_() for t in given]
        out = reference.attention(*leaves, causal=case.causal, scale=case.applied)
        wanted = torch.cat(torch.autograd.grad(out, leaves, dout), 2).numpy()
        assert gradients.expected(case).allows(wanted), case


def test_gradients_of_a_library_are_named(tried):
    automatic = """\
import torch


def attention_backward(q, k, v, out, lse, dout, causal, scale):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    Nq, Nk = q.shape[2], k.shape[2]
    mask = torch.ones(Nq, Nk, dtype=torch.bool).tril(Nk - Nq) if causal else None
    f = torch.nn.functional.scaled_dot_product_attention
    return torch.autograd.grad(f(*leaves, attn_mask=mask, scale=scale), leaves, dout)
"""
    found = tried("mine.py", automatic, backward=True)
    assert found.right and "autograd.grad" in found.library and "scaled_dot_product" in found.library


def test_the_command(cli, failed, extension):
    assert "with --backward it must end with .cpp, .py" in failed("try", "mine.cu", "--backward")
    for name in ("mine.cpp", "mine.py"):
        assert f"try {name} --backward\n" in cli("try", "--new", name, "--backward").stderr
    assert "--backward does not go with --inference" in failed("try", "mine.py", "--backward", "--inference")
    assert "mine.cpp must define void attention" in cli("try", "mine.cpp", code=1).stdout
    Path("mine.py").write_text(NUMPY.replace("- D)", ")"))
    shown = cli("try", "mine.py", "--backward", code=1).stdout
    for words in ("mine.py's backward pass is wrong", "numbers of dq are off", "D is left out"):
        assert words in shown, words
