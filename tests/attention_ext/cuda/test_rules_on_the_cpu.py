"""Without a GPU: backward1's gradients under rules, by the emulator; rules.h is that of all kernels."""

import ctypes
import math
import random
import shutil
from typing import Any

import cuda_on_cpu
import oracle
import pytest
import torch

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.build.nvrtc import SOURCES
from shakespeare.attention_ext.cuda import calls
from shakespeare.attention_ext.cuda.launches import PADDING_OF_ROWS, RULES
from shakespeare.attention_ext.extension import of_bias

SIDE, D = 8, 16
RULED, SOFTCAP, ALIBI, DOCUMENTS, ADDS, HIDES, GRADIENT, MODIFIED = RULES.values()
MEMORY = 4 * SIDE * (D + 1) + 2 * SIDE * (SIDE + 1)  # floats in shared memory
WORK = f"""
#define __shared__
struct At;
float memory[{MEMORY}];
#include "backward1.cu"
struct Work {{
    Call call;
    Gradients to;
    int pass;
}};
void decode(const Work& w) {{
    if (w.pass == 0) attention_backward_rows(w.call, w.to);
    if (w.pass == 1) attention_backward_keys(w.call, w.to);
    if (w.pass == 2) attention_backward_queries(w.call, w.to);
}}
"""


class Work(ctypes.Structure):
    _fields_ = (("call", calls.Call), ("to", calls.Gradients), ("number", ctypes.c_int))


def library(work, rules):
    """The kernel with these rules, compiled for the CPU in a folder."""
    for name in ("backward1.cu", "backward.h", "rules.h", "score_mod.h"):
        shutil.copy(SOURCES / name, work)
    (work / "standard.h").write_text("")  # the C++ library is here
    (work / "mine.h").write_text(oracle.HEADER)
    (work / "work.h").write_text(WORK)
    sizes = {"FORMAT": 0, "BLOCKS": 1, "SHARED_BYTES": 0, "THREADS": SIDE * SIDE, "BR": SIDE, "BC": SIDE}
    header = {"SCORE_MOD": '"mine.h"', "__CUDACC_RTC__": 1} if rules & MODIFIED else {}
    tile = {"EACH": 1, "PITCH": D + 1, "HEAD_DIM": D, "RULES": rules}
    cuda_on_cpu.build(work, "work.h", sizes | tile | header)
    return ctypes.CDLL(work / "emulator.so")


def strides(t):
    return calls.Strides(*t.stride()[:3])


@pytest.mark.parametrize("hidden", [False, True], ids=["added", "hidden"])
def test_gradients_under_all_rules(extension, tmp_path, hidden):
    B, H, Hk, Nq, Nk, scale, cap, left = 2, 4, 2, 19, 27, 0.3, 3.0, 15
    rules = RULED + SOFTCAP + ALIBI + DOCUMENTS + MODIFIED + (HIDES if hidden else ADDS + GRADIENT)
    emulated = library(tmp_path, rules)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(B, h, n, D) for h, n in ((H, Nq), (Hk, Nk), (Hk, Nk), (H, Nq)))
    bias = oracle.a_bias(random.Random(2), B, 1, Nq, Nk, device="cpu").detach()
    bias = bias > -0.5 if hidden else bias
    slopes, documents = torch.rand(B, H), torch.arange(Nk).expand(B, Nk) * 7 % 3
    leaves = [t.requires_grad_() for t in ((q, k, v) if hidden else (q, k, v, bias))]
    documents = documents.contiguous()
    given: dict[str, Any] = dict(window=(left, 2), softcap=cap, alibi_slopes=slopes, documents=documents)
    given |= dict(bias=bias, score_mod=tmp_path / "mine.h")
    out, lse = attention("part0", q, k, v, scale=scale, return_lse=True, **given)
    right = torch.autograd.grad(out, leaves, dout)

    q, k, v, bias, out, lse = (t.detach().contiguous() for t in (q, k, v, bias, out, lse))
    extents = torch.zeros(B, 1 + Nk, 2, dtype=torch.int32)
    extents[:, 0, 0] = 1  # the numbers do not grow
    rows = torch.zeros(B * H * PADDING_OF_ROWS * 2)
    dq, dk, dv, dbias = map(torch.zeros_like, (q, k, v, torch.zeros(B, H, Nq, Nk)))
    by = calls.Strides(*bias.expand(B, H, Nq, Nk).stride()[:3])
    log2e = 1 / math.log(2)
    ruled = calls.Rules(
        slopes=slopes.data_ptr(), documents=documents.data_ptr(), extents=extents.data_ptr(),
        left=left, right=2, group=H // Hk, softcap=cap * log2e, softcap_below=1 / (cap * log2e),
        extent_rows=1 + Nk, bias=bias.data_ptr(), bias_strides=by,
    )  # fmt: skip
    at = (t.data_ptr() for t in (q, k, v, out, lse))
    call = calls.Call(*at, *map(strides, (q, k, v, out)), B, H, Nq, Nk, False, scale * log2e, ruled)
    gradients = (t.data_ptr() for t in (rows, dq, dk, dv, dbias))
    to = calls.Gradients(dout.data_ptr(), strides(dout), None, *gradients)
    blocks = B * H * PADDING_OF_ROWS * 32 // SIDE**2, B * Hk * -(-Nk // SIDE), B * H * -(-Nq // SIDE)
    for number, count in enumerate(blocks):
        work = Work(call, to, number)
        for block in range(count):  # one after the other: they have one shared memory
            emulated.begin_at(block)
            assert emulated.run(ctypes.byref(work), 1, block) == 0
    got = [dq, dk, dv] if hidden else [dq, dk, dv, of_bias(dbias, bias)]
    for mine, theirs in zip(got, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
