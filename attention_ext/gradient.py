"""Part 4's gradient on the CPU: its operators in PyTorch's autograd, with their fake implementations."""

import torch
from torch import Tensor, library

from attention_ext.checks import check_tensors
from attention_ext.parts import PARTS

FORWARD, BACKWARD = PARTS["part4"].gradient, "part4_backward"


def register(name: str) -> None:
    """Register the fakes of torch.ops.<name>'s FORWARD and BACKWARD, and FORWARD's gradient."""
    forward, backward = f"{name}::{FORWARD}", f"{name}::{BACKWARD}"
    library.register_fake(forward, _fake_forward)
    library.register_fake(backward, _fake_backward)
    kernel = getattr(torch.ops, name).part4_backward.default

    def gradient(ctx, dout: Tensor | None, dlse: Tensor | None):
        q, k, v, out, lse = ctx.saved_tensors
        dout = out.new_zeros(1).expand_as(out) if dout is None else dout
        dlse = out.new_empty(0) if dlse is None else dlse
        grads = kernel(dout, dlse, q, k, v, out, lse, ctx.causal, ctx.scale)
        return *grads, None, None, None, None

    library.register_autograd(forward, gradient, setup_context=_save)
    library.register_autograd(backward, _refuse)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, ctx.scale, *_ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _refuse(ctx, *grads):
    raise RuntimeError("part4 has no second gradient; only part0 has")


def _fake_forward(q, k, v, causal, scale, br, bc):
    check_tensors(PARTS["part4"], q, k, v, causal)
    B, H, Nq, d = q.shape
    return q.new_empty(B, H, Nq, d), q.new_empty((B, H, Nq), dtype=torch.float32)


def _fake_backward(dout, dlse, q, k, v, out, lse, causal, scale):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
