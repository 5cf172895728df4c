"""The Engine protocol, which computes the next tokens of several texts, and open_engine().

Only the torch engine imports torch, only the cuda engine CUDA, and only the webgpu engine wgpu.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shakespeare.attention_ext import processor, tiles
from shakespeare.attention_ext.checks import none_is_default, whole
from shakespeare.attention_ext.cuda import kernels as on_cuda
from shakespeare.attention_ext.parts import (
    DEVICES,
    BuildError,
    CachePrecision,
    Part,
    Precision,
    check_part,
    one_of,
    resolve_simd,
    running_on,
)
from shakespeare.generation.sampling import Sampling
from shakespeare.model.checkpoint import Checkpoint, loaded, named_draft
from shakespeare.model.config import GPTConfig
from shakespeare.model.draft import Draft

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT

Name = TypeVar("Name", Precision, CachePrecision)
ENGINES = ("native", "torch", "cuda", "webgpu")
ON_DEVICE = {"cpu": ("native", "torch"), "cuda": ("torch", "cuda"), "webgpu": ("webgpu",)}


class Engine(Protocol):
    """Holds texts in numbered slots, each with its own cache and sampling, and continues them.

    A slot's tokens do not depend on what other slots hold.
    """

    name: str
    config: GPTConfig
    slots: int  # the most texts that the engine holds
    capacity: int  # tokens of context of each text, at most block_size
    fast_in_step: bool  # whether texts of equal length in neighbouring slots are written faster
    tokens_at_once: int  # the most of each text that are worth asking for in a call of write()
    simd_name: str | None  # the SIMD helpers under the part; None for part0 and on a GPU
    threads: int  # the most that it uses on the CPU

    def uniforms(self, seed: int) -> Callable[[int], NDArray[np.float64]]:
        """A function that gives the next `count` numbers of a seed, in [0, 1): torch.rand's in float64."""

    def set_sampling(self, slot: int, sampling: Sampling, logprobs: int | None = None) -> None:
        """Set how the slot's tokens are chosen from now on; at first it is by Sampling().

        logprobs: keep the log-probabilities of these tokens, each with this many alternatives, 0 to 5; None
        keeps none. Those that were not taken are dropped.
        """

    def take_logprobs(self, slot: int) -> Sequence[tuple[int, float, Sequence[tuple[int, float]]]]:
        """The fields of each TokenLogprob kept since the last call, in the order of the tokens."""

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        """Begin to replace the slot's tokens by `ids`, 1 to `capacity` of them, which read() reads.

        continues: the slot's text continues, and the penalties still count its earlier tokens.
        top: also keep the log-probabilities of ids[1:], each with `top` alternatives. It changes no token.
        """

    def read(self, slot: int, seconds: float = math.inf) -> bool:
        """Read for about this long, at least one piece of work; return whether all tokens are read.

        The slot holds no text before. An engine may read all in one call.
        """

    def drop(self, slot: int) -> None:
        """Cancel a begin() and free its memory."""

    def write(self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None) -> NDArray[Any]:
        """Choose a token for each of these slots and append it, for each row of uniforms.

        Returns the tokens, whole numbers: (rows that were written, slots).
        uniforms: (rows, slots) in [0, 1). They decide the choices.
        seconds: the engine begins no further row after about this long; by default so soon that Ctrl-C takes
        effect. It writes at least one row, and stops when a slot is full. A slot with capacity + 1 tokens,
        whose last one is not yet read, must be read again first.
        """

    def copy(self, source: int, *targets: int) -> None:
        """Copy the text of slot `source` to other slots; each keeps its own sampling.

        Log-probabilities are not copied.
        """

    def logits(self, slot: int) -> list[float]:
        """The slot's latest logits (V,). Its last token was, or its next one will be, chosen from them."""


@none_is_default
def open_engine(
    model: Checkpoint | GPT | str | Path,
    engine: str | None = None,
    *,
    part: str = "part4",
    simd: str = "auto",
    br: int | None = None,
    bc: int | None = None,
    weights: str = "fp32",
    kv_cache: str = "fp32",
    slots: int = 1,
    capacity: int | None = None,
    device: str = "cpu",
    kernel: str | None = None,
    threads: int | None = None,
    draft: Draft | str = "auto",
) -> Engine:
    """Open an engine for a model; the native engine and a GPU copy the weights.

    model: loaded, or a name for load(). None stands for each default.
    engine: one of ENGINES; None takes native for parts 1 to 4, else torch. On a GPU, None takes cuda for
    part4 without a kernel if the model fits it, else torch; through WebGPU webgpu, and where there is no
    adapter or the model does not fit it, native on the CPU.
    part, simd, br, bc: as in attention(). slots: the most texts at a time.
    weights: a Precision or its name. 'bf16' rounds the matrices to bfloat16, which changes the logits; the
    native engine then reads half as many bytes of weights for each token. 'int8' rounds them to int8 with
    scales, and activations to 21 bits; it reads a quarter.
    kv_cache: a CachePrecision or its name. 'bf16' rounds all keys and values to bfloat16, which changes the
    logits; the native engine then keeps and reads half as many bytes of them.
    capacity: the longest context, in tokens; the model's block size by default.
    device: 'cpu', 'cuda' or 'webgpu'; the latter two without simd and tile. CUDA has the cuda and the torch
    engine, with part0 and part4, WebGPU the webgpu engine, with part4 and weights in fp32. All arithmetic is
    float32. kernel: part4's kernel in the torch engine, as in attention().
    threads: the most that it uses; the torch engine then sets PyTorch's. None takes PyTorch's number where
    torch is imported, else processor.threads().
    draft: what guesses the next tokens in the native engine of one to four texts, in the cuda engine of as
    many as have a cluster each. It changes no text. 'auto' takes the checkpoint's own if it has one, 'off'
    none. Else a Draft, a model's name or a draft's file.
    Raises TypeError or ValueError naming the wrong argument, BuildError if the kernels cannot be compiled or
    there is no GPU.
    """
    if isinstance(model, (str, Path)) or not hasattr(model, "config"):
        model = loaded(model)
    slots = whole("slots", slots)
    capacity = None if capacity is None else whole("capacity", capacity)
    threads = None if threads is None else whole("threads", threads)
    row, helpers = check_part(part), resolve_simd(simd)
    br, bc = tiles.checked_sides(br, bc)
    if engine not in (None, *ENGINES):
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine in ("native", "cuda", "webgpu") and row.operator is None:
        raise ValueError(
            f"engine is {engine!r}; it must be 'torch' with {part}, which is PyTorch's attention"
        )
    if engine == "cuda" and kernel is not None:
        raise ValueError(f"kernel is {kernel!r}; it must be None with engine='cuda', which has its own")
    precision, cache = member(Precision, "weights", weights), member(CachePrecision, "kv_cache", kv_cache)
    for name, number in (("slots", slots), ("threads", threads)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    longest = model.config.block_size
    if capacity is None:
        capacity = longest
    if not 1 <= capacity <= longest:
        raise ValueError(f"capacity is {capacity}; it must be from 1 to block_size={longest}")
    if device == "webgpu" and kernel is not None:
        raise ValueError(f"kernel is {kernel!r}; it must be None with the webgpu engine, which has its own")
    check_kernel(device, row, kernel, model.config.head_dim)
    if engine not in (None, *ON_DEVICE[device]):
        others = " or ".join(map(repr, ON_DEVICE[device]))
        raise ValueError(f"engine is {engine!r}; it must be {others} on {DEVICES[device]}")
    if device != "cpu":
        for name, given, only in (("simd", simd, "auto"), ("br", br, None), ("bc", bc, None)):
            if given not in (None, only):
                raise ValueError(f"{name} is {given!r}; it must be {only!r} on {DEVICES[device]}")
    if device == "webgpu":
        from shakespeare.generation.engines import webgpu

        try:
            return webgpu.WebGpuEngine(model, precision, cache, slots, capacity)
        except (BuildError, webgpu.Unfit) as error:
            if engine == "webgpu":
                raise
            print(f"{error}; the native engine writes on the CPU", file=sys.stderr, flush=True)
        engine, device = "native", "cpu"
    if device == "cuda":
        if engine == "cuda" or engine is None and row.operator and kernel is None:
            from shakespeare.generation.engines import cuda

            try:
                return cuda.CudaEngine(
                    model, precision, cache, slots, capacity, draft=chosen_draft(model, draft)
                )
            except cuda.Unfit as error:
                if engine == "cuda":
                    raise
                print(f"{error}; the torch engine writes", file=sys.stderr, flush=True)
        engine = "torch"
    if engine is None:
        engine = default_engine(part)
    if engine != "native" and not (isinstance(draft, str) and draft in ("auto", "off")):
        raise ValueError(
            f"draft is {draft!r}; it must be 'auto' or 'off' but in the native and the cuda engine"
        )
    if engine == "native" and row.file:
        raise ValueError(
            f"engine is 'native'; it must be 'torch' with {part}, which the decoder does not link"
        )
    if engine == "torch":
        from shakespeare.generation.engines.pytorch import open_torch

        tile = (br, bc)
        return open_torch(
            model, row, helpers, tile, precision, cache, slots, capacity, device, kernel, threads
        )
    from shakespeare.generation.engines.native import Decoder

    # Each thread of the decoder calls the kernel itself, so the tile is that of one thread.
    tuned = tiles.tile(helpers, 1, model.config.head_dim, capacity, causal=True)
    tile = (br or tuned[0], bc or tuned[1])
    if threads is None:
        of_torch = getattr(sys.modules.get("torch"), "get_num_threads", processor.threads)
        threads = of_torch()
    return Decoder(
        model, part, helpers, tile, precision, cache, slots, capacity, threads, chosen_draft(model, draft)
    )


def chosen_draft(model: Checkpoint | GPT, draft: Draft | str) -> Draft | None:
    """The draft that open_engine()'s argument names, or None. Raises DraftError if it does not fit."""
    if isinstance(draft, Draft) or draft == "off":
        return draft if isinstance(draft, Draft) else None
    if not isinstance(model, Checkpoint):
        if draft == "auto":
            return None
        raise ValueError(
            f"draft is {draft!r}; it must be 'auto', 'off' or a Draft for a model without a vocabulary"
        )
    return model.draft if draft == "auto" else named_draft(draft, model.tokenizer)


def check_kernel(device: str, part: Part, kernel: str | None, head_dim: int) -> None:
    """Raise ValueError unless a part runs on a device with this kernel and head width."""
    one_of("device", device, DEVICES)
    if device not in part.dtypes:
        others = " and ".join(running_on(device))
        raise ValueError(f"device is {device!r}; {part.name} does not run there, only {others}")
    if kernel is not None:
        on_cuda.check_kernel(kernel)
        if device == "cpu":
            raise ValueError(f"kernel is {kernel!r}; it must be None on the CPU: it is one of CUDA's")
        if part.operator is None:
            raise ValueError(f"kernel is {kernel!r}; it must be None with {part.name}, which is PyTorch's")
    if device == "cuda" and part.operator and head_dim > on_cuda.WIDEST:
        raise ValueError(
            f"model has heads of d={head_dim}; d must be at most {on_cuda.WIDEST} on CUDA in {part.name}"
        )


def member(kind: type[Name], name: str, value: str) -> Name:
    """The member of an enum with this name. Raises ValueError naming the argument if there is none."""
    if value not in list(kind):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(kind)}")
    return kind(value)


def rows_of(uniforms: ArrayLike, count: int) -> NDArray[np.float64]:
    """The numbers (rows, count) of a call of write(). Raises ValueError unless a row has so many."""
    numbers = np.ascontiguousarray(uniforms, float)
    if numbers.ndim != 2 or numbers.shape[1] != count:
        must = f"it must be the number of slots, {count}"
        raise ValueError(f"the number of uniforms is {numbers.shape[-1]}; {must}")
    return numbers


def default_engine(part: str) -> str:
    """The name of the engine that a part uses by default."""
    return "native" if check_part(part).operator else "torch"
