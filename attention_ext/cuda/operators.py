"""Part 4 on CUDA as a PyTorch operator, torch.ops.attention_ext_cuda.flash, with its fake."""

import math

import torch
from torch import Tensor, library

from attention_ext.checks import check_tensors
from attention_ext.cuda import driver
from attention_ext.cuda.kernels import MOST_ROWS, WIDEST, Kernel, check_kernel
from attention_ext.cuda.launches import Call, Strides
from attention_ext.parts import PARTS, Dtype

NAME, PART = "attention_ext_cuda", PARTS["part4"]
SCHEMA = (
    "flash(Tensor q, Tensor k, Tensor v, bool causal, float scale, bool return_lse, str? kernel=None) "
    "-> (Tensor, Tensor)"
)
ALIGNMENT = 16  # bytes of a vector load


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, return_lse: bool, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """Part 4 by the kernel with this name, by the fastest for None. For the arguments see attention().

    Returns the output (B, H, Nq, d), contiguous, and the logsumexp (B, H, Nq), or an empty tensor without it.
    """
    _check(q, k, v, causal, kernel)
    B, H, Nq, d = q.shape
    Nk = k.shape[2]
    with torch.cuda.device(q.device):
        chosen = driver.compiled(kernel, B * H, Nq, Nk, d, Dtype.of(q.dtype), q.device.index)
        row = chosen.row
        q, k, v = (_laid_out(t, row) for t in (q, k, v))
        out = q.new_empty(B, H, Nq, row.padded(d))
        lse = q.new_empty((B, H, Nq) if return_lse else (0,), dtype=torch.float32)
        pointers = (t.data_ptr() for t in (q, k, v, out))
        strides = (Strides(*t.stride()[:3]) for t in (q, k, v))
        lse_pointer = lse.data_ptr() if return_lse else None
        call = Call(*pointers, lse_pointer, *strides, B, H, Nq, Nk, causal, scale / math.log(2))
        row.launch(chosen, call, q, k, v)
    return (out if out.shape[3] == d else out[..., :d].contiguous()), lse


def _fake(q, k, v, causal, scale, return_lse, kernel=None):
    _check(q, k, v, causal, kernel)
    rows = q.shape[:3]
    return q.new_empty(*rows, q.shape[3]), q.new_empty(rows if return_lse else (0,), dtype=torch.float32)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: str | None) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the kernels take the arguments."""
    check_tensors(PART, q, k, v, causal)
    if kernel is not None:
        check_kernel(kernel)
    if q.shape[3] > WIDEST:
        raise ValueError(f"q has d={q.shape[3]}; it must be at most {WIDEST} on CUDA in {PART.name}")
    for name, rows, t in (("q", "Nq", q), ("k", "Nk", k)):
        if t.shape[2] > MOST_ROWS:
            raise ValueError(f"{name} has {rows}={t.shape[2]} rows; it must have at most {MOST_ROWS} on CUDA")


def _laid_out(t: Tensor, row: Kernel) -> Tensor:
    """The tensor (B, H, N, d) as a kernel reads it: itself, or a copy whose rows are padded and aligned."""
    d, size = t.shape[3], t.element_size()
    if more := row.padded(d) - d:
        return torch.nn.functional.pad(t, (0, more))
    strides = [stride for stride, n in zip(t.stride(), t.shape[:3]) if n > 1]
    aligned = not row.vectors or (
        t.data_ptr() % ALIGNMENT == 0
        and all(stride * size % ALIGNMENT == 0 for stride in strides)
        and (t.stride(2) > 0 or t.shape[2] == 1)  # a tensor map cannot repeat a row
    )
    if aligned and (t.stride(3) == 1 or d == 1):
        return t
    return t.clone(memory_format=torch.contiguous_format)


_library = library.Library(NAME, "DEF")
_library.define(SCHEMA)
_library.impl("flash", _flash, "CUDA")
library.register_fake(f"{NAME}::flash", _fake, lib=_library)

flash = torch.ops.attention_ext_cuda.flash.default
