"""Loads what is compiled: attention's operators in torch.ops, and the Python modules of other packages."""

import functools
import importlib.util
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import library as torch_library

from attention_ext import gradient as gradients
from attention_ext.build import recipes
from attention_ext.checks import check_tensors
from attention_ext.parts import PARTS, BuildError, Dtype, check_part, resolve_simd

_loading = threading.Lock()


def load(simd: str = "auto") -> Any:
    """The operators over one of SIMD, torch.ops.attention_ext_<helpers>, compiled first if need be.

    Raises ValueError if simd is not one of SIMD; BuildError if the compiler is missing or fails, or the
    cache directory cannot be used or other users can write to it.
    """
    helpers = resolve_simd(simd)
    with _loading:
        return _load(helpers)


@functools.cache
def _load(helpers: str) -> Any:
    recipe = recipes.operators(helpers)
    library = recipe.make()
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        reason = error.__cause__ or error  # torch's own message names only the library
        raise BuildError(f"{library} cannot be loaded ({reason}); delete it to compile it again") from None
    _register_fakes(recipe.name)
    gradients.register(recipe.name)
    return getattr(torch.ops, recipe.name)


def _register_fakes(name: str) -> None:
    """Register the operators' output shapes and types, for torch.compile and opcheck."""

    def fake(part, q, k, v, causal, scale, return_lse, br=1, bc=1):
        check_tensors(part, q, k, v, causal)
        B, H, Nq, d = q.shape
        lse = q.new_empty((B, H, Nq) if return_lse else (0,), dtype=torch.float32)
        return q.new_empty(B, H, Nq, d), lse

    for part in PARTS.values():
        if part.operator:
            torch_library.register_fake(f"{name}::{part.operator}", functools.partial(fake, part))


def operator(part: str, simd: str = "auto", gradient: bool = False) -> Callable:
    """The PyTorch operator of one of parts 1 to 4. gradient: part4's operator with a gradient.

    Raises ValueError for a part without such an operator, and errors as load() does.
    """
    row = check_part(part)
    name = row.gradient if gradient else row.operator
    if name is None:
        what = "with a gradient" if gradient else "with an operator"
        raise ValueError(f"part is {part!r}; it must be one {what}; {part} has none")
    return getattr(load(simd), name).default


def load_module(name: str, packages: tuple[str, ...], simd: str = "auto") -> ModuleType:
    """The Python module `name` of C++ in the folders `package`/csrc, over one of SIMD, compiled if need be.

    Raises ValueError and BuildError as load() does, and BuildError if Python's header is missing.
    """
    helpers = resolve_simd(simd)
    with _loading:
        return _load_module(name, packages, helpers)


@functools.cache
def _load_module(name: str, packages: tuple[str, ...], helpers: str) -> ModuleType:
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
    """One line for people: the SIMD helpers, instruction set and number of threads in use."""
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"SIMD: {load(simd).simd_name()}, {capability}, {threads} thread{'s' * (threads > 1)}"


def scratch(
    part: str,
    B: int,
    H: int,
    Nq: int,
    Nk: int,
    d: int,
    *,
    br: int = 1,
    bc: int = 1,
    threads: int = 1,
    simd: str = "auto",
    dtype: Dtype = Dtype.FP32,
) -> int:
    """Bytes of scratch for a call of one of parts 1 to 4, as computed by its kernel."""
    name, bf16 = check_part(part).operator, dtype is Dtype.BF16
    return 4 * load(simd).scratch(name, bf16, B, H, Nq, Nk, d, br, bc, threads)


def uses_amx(queries: int, simd: str = "auto") -> bool:
    """Whether part4 uses AMX for this many bfloat16 queries on this machine."""
    return load(simd).uses_amx(queries)


def size(name: str, simd: str = "auto") -> int:
    """A constant that the kernels are compiled with, by its name in csrc/bindings/operators.cpp."""
    return load(simd).size(name)


def read_4d(t: torch.Tensor, index: tuple[int, int, int, int]) -> float:
    """t[index] as the extension reads it, by strides; t is a float32 CPU tensor (B, H, N, d).

    Raises ValueError if t or index is anything else.
    """
    if t.dtype != torch.float32 or t.device.type != "cpu" or t.ndim != 4:
        raise ValueError(f"t is {t.dtype} on {t.device} of shape {tuple(t.shape)}; it must be 4-D float32")
    if len(index) != 4 or any(not 0 <= i < n for i, n in zip(index, t.shape)):
        raise ValueError(f"index is {index}; it must be inside the shape {tuple(t.shape)}")
    return load().read_4d(t, *index)
