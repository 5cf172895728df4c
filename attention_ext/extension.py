"""Loads what is compiled: attention's operators in torch.ops, libraries with a C interface, Python modules.

A library with a C interface needs no torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.build import prebuilt
from shakespeare.attention_ext.checks import check_tensors
from shakespeare.attention_ext.parts import AUTO, PARTS, BuildError, Dtype, check_part, resolve_simd
from shakespeare.attention_ext.rules import ARGUMENTS

if TYPE_CHECKING:
    import torch

    from shakespeare.attention_ext.build.recipes import Recipe

_loading = threading.RLock()


def load(simd: str = "auto") -> Any:
    """The operators over one of SIMD, torch.ops.attention_ext_<helpers>, compiled on first use.

    Raises ValueError if simd is not one of SIMD; BuildError if the compiler is missing or fails, or the cache
    directory cannot be used or other users can write to it.
    """
    with _loading:
        return _load(resolve_simd(simd))


@functools.cache
def _load(helpers: str) -> Any:
    from shakespeare.attention_ext.build import recipes

    recipe = recipes.operators(helpers)
    loaded = load_operators(recipe)
    _register(recipe.name, loaded)
    return loaded


def load_operators(recipe: Recipe) -> Any:
    """A recipe's operators, torch.ops.<its name>, compiled on first use. Raises BuildError as load() does."""
    import torch

    with _loading:
        library = recipe.make()
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        reason = error.__cause__ or error  # torch's own message names only the library
        raise BuildError(f"{library} cannot be loaded ({reason}); delete it to compile it again") from None
    return getattr(torch.ops, recipe.name)


def _register(name: str, operators: Any) -> None:
    """Tell PyTorch of the operators' outputs, for torch.compile and opcheck, and of part4's gradient."""
    import torch

    from shakespeare.attention_ext import torch_func

    def fake(part, q, k, v, causal, scale, return_lse, *tile_and_rules):
        check_tensors(part, q, k, v, causal, grouped=True)
        lse = q.new_empty(q.shape[:3] if return_lse else (0,), dtype=torch.float32)
        return q.new_empty(q.shape), lse

    def fake_with_gradient(q, k, v, causal, scale, *tile_and_rules):
        return fake(PARTS["part4"], q, k, v, causal, scale, True)

    def fake_backward(dout, dlse, q, k, v, out, lse, causal, scale, *of_bias_and_rules):
        of_keys = (*q.shape[:2], *k.shape[2:])
        found = [q.new_empty(shape) for shape in (q.shape, of_keys, of_keys)]
        if of_bias_and_rules:
            found.append(q.new_empty((*q.shape[:3], k.shape[2]) if of_bias_and_rules[0] else (0,)))
        return tuple(found)

    def save_call(ctx, inputs, output) -> None:
        q, k, v, ctx.causal, ctx.scale, br, bc, *rules = inputs
        save(ctx, rules, q, k, v, *output)
        ctx.set_materialize_grads(False)

    def gradient(ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        dout = out.new_zeros(1).expand_as(out) if dout is None else dout
        dlse = out.new_empty(0) if dlse is None else dlse
        call = (dout, dlse, q, k, v, out, lse, ctx.causal, ctx.scale)
        rules, needed = saved_rules(ctx, tensors)
        backward = operators.part4_backward_ruled if rules else operators.part4_backward
        compute = torch_func.functions[backward.default] if torch_func.active() else backward.default
        if not rules:
            dq, dk, dv = compute(*call)
            return dq, summed(dk, k), summed(dv, v), None, None, None, None
        dq, dk, dv, dbias = compute(*call, needed["bias"], *rules.values())
        found = {"bias": of_bias(dbias, rules["bias"])} if needed["bias"] else {}
        if needed["sinks"]:
            found["sinks"] = of_sinks(dout, dlse if dlse.numel() else None, out, lse, rules["sinks"])
        of_call = (None,) * 4  # causal, scale and the tile
        return dq, summed(dk, k), summed(dv, v), *of_call, *map(found.get, ARGUMENTS)

    def summed(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The gradient of k or v from those of each of q's heads."""
        if gradient.shape == tensor.shape:
            return gradient
        return gradient.unflatten(1, (tensor.shape[1], -1)).sum(2)

    for rules in ("", "_ruled"):
        forward = f"{name}::part4_with_gradient{rules}"
        backward = f"{name}::part4_backward{rules}"
        torch.library.register_fake(forward, fake_with_gradient)
        torch.library.register_fake(backward, fake_backward)
        torch.library.register_autograd(forward, gradient, setup_context=save_call)
        torch.library.register_autograd(backward, refuse_second)
        torch_func.register(getattr(operators, f"part4_with_gradient{rules}").default, gradient, save_call)
        torch_func.register(getattr(operators, f"part4_backward{rules}").default, refuse_second)
        for part in PARTS.values():
            if part.operator:
                by_part = functools.partial(fake, part)
                torch.library.register_fake(f"{name}::{part.operator}{rules}", by_part)


def save(ctx, rules: Sequence[Any], *tensors: torch.Tensor) -> None:
    """Keep tensors and the arguments of rules for a backward pass."""
    import torch

    of_rules = [rule if isinstance(rule, torch.Tensor) else None for rule in rules]
    ctx.numbers = [None if isinstance(rule, torch.Tensor) else rule for rule in rules]
    ctx.save_for_backward(*tensors, *of_rules)


def saved_rules(ctx, tensors: Sequence[torch.Tensor | None]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Rules by name, and whether each needs a gradient. tensors: what save() kept of them."""
    rules = [number if t is None else t for number, t in zip(ctx.numbers, tensors)]
    return dict(zip(ARGUMENTS, rules)), dict(zip(ARGUMENTS, ctx.needs_input_grad[-len(ARGUMENTS) :]))


def of_bias(gradient: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of bias (B or 1, H or 1, Nq, Nk) from that of all heads' (B, H, Nq, Nk)."""
    for side in (0, 1):
        if bias.shape[side] == 1:
            gradient = gradient.sum(side, keepdim=True)
    return gradient


def of_sinks(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The gradient of sinks (H,): a sink's weight is exp(sink - lse), and it has no value."""
    D = (dout * out).sum(-1) - (0 if dlse is None else dlse)
    return -((sinks[:, None] - lse).exp() * D).sum((0, 2))


def refuse_second(ctx, *grads):
    """The gradient of part4's backward pass."""
    raise RuntimeError("part4 has no second gradient; only part0 has")


def load_library(name: str, recipe: Callable[[str], Recipe], simd: str = "auto") -> ctypes.CDLL:
    """The library `name`, from a wheel or compiled over one of SIMD. Raises as load() does."""
    with _loading:
        if resolve_simd(simd) == AUTO and prebuilt.in_wheel():
            library = prebuilt.checked(name)
            remedy = prebuilt.REMEDY
        else:
            library = recipe(simd).make()
            remedy = "delete it to compile it again"
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(f"{library} cannot be loaded ({error}); {remedy}") from None


def load_module(name: str, packages: tuple[str, ...], simd: str = "auto") -> ModuleType:
    """The same as a Python module, which may use PyTorch; it also needs Python's header."""
    with _loading:
        return _load_module(name, packages, resolve_simd(simd))


@functools.cache
def _load_module(name: str, packages: tuple[str, ...], helpers: str) -> ModuleType:
    from shakespeare.attention_ext.build import recipes

    library = recipes.module(name, packages, helpers).make()
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None  # .so is an extension module's suffix
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise BuildError(f"{library} cannot be loaded ({error}); delete it to compile it again") from None
    spec.loader.exec_module(module)
    return module


def describe(simd: str = "auto") -> str:
    """One line for people: the SIMD helpers, instruction set and number of PyTorch's threads."""
    import torch

    return describe_helpers(load(simd).simd_name(), torch.get_num_threads())


def describe_helpers(name: str, threads: int) -> str:
    """One line for people: SIMD helpers, the processor's instruction set and a number of threads."""
    return f"SIMD: {name}, {processor.instructions()}, {threads} thread{'s' if threads > 1 else ''}"


def scratch(
    part: str,
    sizes: tuple[int, int, int, int, int],
    *,
    br: int = 1,
    bc: int = 1,
    threads: int = 1,
    simd: str = "auto",
    dtype: Dtype = Dtype.FP32,
) -> int:
    """Bytes of scratch for a call of one of parts 1 to 4, by its kernel. sizes: B, H, Nq, Nk and d."""
    name = check_part(part).operator
    bf16 = dtype is Dtype.BF16
    return 4 * load(simd).scratch(name, bf16, *sizes, br, bc, threads)


def uses_amx(queries: int, simd: str = "auto") -> bool:
    """Whether part4 uses AMX for this many bfloat16 queries on this machine."""
    return load(simd).uses_amx(queries)


def size(name: str, simd: str = "auto") -> int:
    """A constant that the kernels are compiled with, by its name in csrc/bindings/operators.cpp."""
    return load(simd).size(name)
