"""What computes the next token of several texts: the protocol of an engine, and open_engine()."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from attention_ext import attention, tiles
from attention_ext.parts import Precision, check_part, resolve_simd
from generation.sampling import Sampling
from model.gpt import GPT, GPTConfig

ENGINES = ("native", "torch")


class Engine(Protocol):
    """Texts in numbered slots, each with its cache and its sampling, and a way to continue them.

    What a slot gives depends on nothing that other slots hold.
    """

    name: str
    config: GPTConfig
    slots: int  # texts that it can hold
    capacity: int  # tokens of each, at most block_size

    def set_sampling(self, slot: int, sampling: Sampling) -> None:
        """How the slot's tokens are chosen from now on; Sampling() at first."""

    def prefill(self, slot: int, ids: Sequence[int], continues: bool = False) -> None:
        """Replace what the slot holds by `ids`, 1 to `capacity` of them.

        continues: they are the end of the text that it held, whose tokens still count as seen.
        """

    def next(self, slots: Sequence[int], uniforms: Sequence[float]) -> list[int]:
        """Choose and append a token to each of these slots; the uniforms, in [0, 1), decide.

        A slot that holds capacity + 1 tokens, the last one not yet read, must be prefilled again.
        """

    def write(self, slots: Sequence[int], uniforms: Sequence[Sequence[float]]) -> list[list[int]]:
        """What next() gives for each row of uniforms in turn, as many rows as the engine takes in one go.

        That is at least the first, and none beyond the room in the slots.
        """

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` hold what slot `source` holds; each keeps its own sampling."""

    def push(self, slot: int, token: int) -> None:
        """Append this token instead of a chosen one, and read it."""

    def logits(self, slot: int) -> Tensor:
        """The logits (V,) from which the slot's next token, or else its last one, was chosen."""


def open_engine(
    model: GPT,
    engine: str | None = None,
    *,
    part: str = "part4",
    simd: str = "auto",
    br: int | None = None,
    bc: int | None = None,
    weights: str = "fp32",
    slots: int = 1,
    capacity: int | None = None,
) -> Engine:
    """An engine for a model's weights, which are copied by the native one.

    engine: one of ENGINES; None takes native for parts 1 to 4 where it can be compiled, torch for part0.
    part, simd, br, bc: the attention, as attention() takes them. slots: texts at a time.
    weights: a Precision or its name; 'bf16' rounds the matrices to bfloat16, which changes the logits; the
    native engine then reads half as much for each token.
    capacity: the longest context, in tokens; the model's block size unless given.
    The native engine uses as many threads as PyTorch is set to when this is called.
    Raises TypeError or ValueError naming an argument that is wrong, BuildError where the kernels cannot be
    compiled.
    """
    for name, number in (("slots", slots), ("capacity", capacity)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name} is a {type(number).__name__}; it must be a whole number")
    row, helpers = check_part(part), resolve_simd(simd)
    tiles.check_sides(br, bc)
    if engine not in (None, *ENGINES):
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine == "native" and row.operator is None:
        raise ValueError(f"engine is 'native'; it must be 'torch' with {part}, which is PyTorch's attention")
    if weights not in list(Precision):
        raise ValueError(f"weights is {weights!r}; it must be one of {', '.join(Precision)}")
    precision = Precision(weights)
    if slots < 1:
        raise ValueError(f"slots is {slots}; it must be at least 1")
    longest = model.config.block_size
    if capacity is None:
        capacity = longest
    if not 1 <= capacity <= longest:
        raise ValueError(f"capacity is {capacity}; it must be from 1 to block_size={longest}")
    if engine is None:
        engine = default_engine(part)
    if engine == "torch":
        from generation.pytorch import TorchEngine

        model = model.with_attention(partial(attention, part, causal=True, br=br, bc=bc, simd=helpers))
        return TorchEngine(model.in_bf16() if precision is Precision.BF16 else model, slots, capacity)
    from generation.native import NativeEngine

    # Each of its threads runs the kernel alone.
    tuned = tiles.tile(helpers, 1, model.config.head_dim, capacity, causal=True)
    tile = (br or tuned[0], bc or tuned[1])
    return NativeEngine(model, part, helpers, tile, precision, slots, capacity)


def default_engine(part: str) -> str:
    """The engine that a part has unless another is asked for."""
    if check_part(part).operator is None:
        return "torch"
    from attention_ext.build import toolchain

    return "native" if toolchain.has_python_header() else "torch"
