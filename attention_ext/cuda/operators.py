"""Registers part 4 on CUDA as a PyTorch operator, torch.ops.attention_ext_cuda.flash, with its fake."""

from __future__ import annotations

import torch
from torch import Tensor, library

NAME = "attention_ext_cuda"
SCHEMA = (
    "flash(Tensor q, Tensor k, Tensor v, bool causal, float scale, bool return_lse, str step='') "
    "-> (Tensor, Tensor)"
)


def _run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, return_lse: bool, step: str = ""):
    from attention_ext.cuda import kernels

    return kernels.run(q, k, v, causal, scale, return_lse, step)


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, return_lse: bool, step: str = ""):
    B, H, Nq, d = q.shape
    return q.new_empty(B, H, Nq, d), q.new_empty((B, H, Nq) if return_lse else (0,), dtype=torch.float32)


_library = library.Library(NAME, "DEF")
_library.define(SCHEMA)
_library.impl("flash", _run, "CUDA")
library.register_fake(f"{NAME}::flash", _fake, lib=_library)

flash = torch.ops.attention_ext_cuda.flash.default
