"""Part 4 on CUDA as PyTorch operators, which bindings/launcher.cpp defines: their fakes, the planner."""

import ctypes
import threading

import torch
from torch import Tensor, library

from shakespeare.attention_ext import extension, torch_func
from shakespeare.attention_ext.build import recipes, structs
from shakespeare.attention_ext.checks import check_size, check_tensors
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import (
    BACKWARD,
    DOCUMENTS,
    GRADIENT,
    MOST_ROWS,
    WIDEST,
    check_kernel,
)
from shakespeare.attention_ext.cuda.launches import LAUNCHER, RULES, Plan, Sizes
from shakespeare.attention_ext.parts import PARTS, Dtype
from shakespeare.attention_ext.rules import ARGUMENTS, Rules, ScoreMod

PART = PARTS["part4"]
DTYPES = list(Dtype)
CONSTANTS = structs.constants(LAUNCHER)
MOST_TEXT = CONSTANTS["MOST_TEXT"] - 1  # bytes of an error that the launcher takes, but for the last
NO_RULES = Rules(left=-1).arguments()  # of flash_backward
NUMBERS = (*[ctypes.c_int] * 4, *[ctypes.c_int64] * 7)
PLANNER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, *NUMBERS, ctypes.POINTER(Plan), ctypes.c_void_p)
_failed = threading.local()  # `error`: what _planned() raised last in this thread


@PLANNER
def _planned(name, format, index, causal, rules, heads, group, Nq, Nk, seen, d, mod, plan, why) -> bool:
    """The launcher asks how to launch sizes that are new to it. The device is current."""
    try:
        kernel = name.decode() if name else None
        call = Sizes(heads, Nq, seen, group, bool(causal or rules))
        if kernel == DOCUMENTS.name:
            tile = DOCUMENTS.tile(d, Dtype.FP32, driver.gpu(index))
            chosen = driver.load(DOCUMENTS, tile, d, Dtype.FP32, index)
        else:
            _check_sizes(kernel, Nq, Nk, d)
            known = ScoreMod.known.get(mod)
            chosen = driver.compiled(kernel, call, d, DTYPES[format], index, rules, known)
        plan[0] = chosen.row.plan(chosen, call)
    except BaseException as error:  # ctypes passes none on
        text = f"{error or type(error).__name__}".encode()[:MOST_TEXT].decode(errors="ignore")
        _failed.error = error
        ctypes.memmove(why, text.encode() + b"\0", len(text.encode()) + 1)
        return False
    return True


def raise_reason(error: Exception) -> None:
    """Raise the error behind a RuntimeError of the launcher, if it has another type."""
    failure = _operators.last_failure()
    if failure == CONSTANTS["PLANNING"]:
        raise _failed.__dict__.pop("error", error)
    if failure == CONSTANTS["MEMORY"]:
        raise torch.OutOfMemoryError(str(error)) from None


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: str | None, grouped: bool = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the kernels take the arguments."""
    check_tensors(PART, q, k, v, causal, grouped=grouped)
    _check_sizes(kernel, q.shape[2], k.shape[2], q.shape[3])


def _check_sizes(kernel: str | None, Nq: int, Nk: int, d: int) -> None:
    check_size(Nq, Nk)
    if kernel not in (None, GRADIENT):
        check_kernel(kernel)
    if d > WIDEST:
        raise ValueError(f"q has d={d}; it must be at most {WIDEST} on CUDA in {PART.name}")
    for name, rows, n in (("q", "Nq", Nq), ("k", "Nk", Nk)):
        if n > MOST_ROWS:
            raise ValueError(f"{name} has {rows}={n} rows; it must have at most {MOST_ROWS} on CUDA")


def _out(q: Tensor, name: str | None) -> Tensor:
    """An output: contiguous, or as (B, Nq, H, d) if q is so and no kernel is named, as in launcher.cpp."""
    turned = q.transpose(1, 2)
    if name is None and not q.is_contiguous() and turned.is_contiguous():
        return q.new_empty(turned.shape).transpose(1, 2)
    return q.new_empty(q.shape)


def _fake(q, k, v, causal, scale, name=None):
    check(q, k, v, causal, name)
    return _out(q, name)


def _fake_with_lse(q, k, v, causal, scale, name=None):
    return _fake(q, k, v, causal, scale, name), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_ruled(q, k, v, causal, scale, name, *rules):
    check(q, k, v, causal, name, grouped=True)
    if name is not None:
        check_kernel(name, RULES["RULED"])
    return _out(q, name), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(dout, dlse, q, k, v, out, lse, causal, scale, name, of_bias, *rules):
    dbias = q.new_empty((*q.shape[:3], k.shape[2]) if of_bias else (0,), dtype=torch.float32)
    return (*(t.new_empty(t.shape) for t in (q, k, v)), dbias)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, ctx.scale, name, *rules = inputs
    ctx.kernel = name if name in BACKWARD else None  # else the forward pass's
    extension.save(ctx, rules, q, k, v, *output)
    ctx.set_materialize_grads(False)


def _gradient(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    dout = out.new_zeros(1).expand_as(out) if dout is None else dout
    call = (dout, dlse, q, k, v, out, lse, ctx.causal, ctx.scale, ctx.kernel)
    compute = torch_func.functions[flash_backward] if torch_func.active() else flash_backward
    rules, needed = extension.saved_rules(ctx, tensors)
    if not rules:
        return *compute(*call, False, *NO_RULES)[:3], None, None, None
    *found, dbias = compute(*call, needed["bias"], *rules.values())
    of_rules = {}
    if needed["bias"]:
        of_rules["bias"] = extension.of_bias(dbias, rules["bias"])
    if needed["sinks"]:
        of_rules["sinks"] = extension.of_sinks(dout.float(), dlse, out.float(), lse, rules["sinks"])
    return *found, None, None, None, *map(of_rules.get, ARGUMENTS)


_operators = extension.load_operators(recipes.launcher())  # BuildError if it cannot be compiled
structs.check(Plan, _operators.plan_by(ctypes.cast(_planned, ctypes.c_void_p).value))
for _name, _of in (("flash_with_lse", _fake_with_lse), ("flash_ruled", _fake_ruled)):
    _with_gradient = f"attention_ext_cuda::{_name.removesuffix('_with_lse')}_with_gradient"
    library.register_fake(f"attention_ext_cuda::{_name}", _of)
    library.register_fake(_with_gradient, _of)
    library.register_autograd(_with_gradient, _gradient, setup_context=_save)
library.register_fake("attention_ext_cuda::flash", _fake)
library.register_fake("attention_ext_cuda::flash_backward", _fake_backward)
library.register_autograd("attention_ext_cuda::flash_backward", extension.refuse_second)
flash = _operators.flash.default
flash_with_lse = _operators.flash_with_lse.default
flash_ruled = _operators.flash_ruled.default
flash_backward = _operators.flash_backward.default
flash_with_gradient = _operators.flash_with_gradient.default
flash_ruled_with_gradient = _operators.flash_ruled_with_gradient.default
torch_func.register(flash_with_gradient, _gradient, _save)
torch_func.register(flash_ruled_with_gradient, _gradient, _save)
torch_func.register(flash_backward, extension.refuse_second)
