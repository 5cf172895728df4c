"""What all engines share: the protocol, the options that they are opened with, and how one refuses a model.

It imports no engine; the table of them is in table.py.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shakespeare.attention_ext import default_tile, parts
from shakespeare.attention_ext.checks import set_defaults, set_whole
from shakespeare.attention_ext.cuda.kernels import KERNELS
from shakespeare.attention_ext.parts import CachePrecision, Part, Precision
from shakespeare.generation.sampling import Sampling
from shakespeare.model.config import GPTConfig
from shakespeare.model.draft import Draft

Name = TypeVar("Name", Precision, CachePrecision)
MOST_SLOTS = 65_536
ENDLESS = 2**62  # the capacity of an endless model's texts, in tokens
Tokens = NDArray[Any]  # whole numbers, (rows, slots)
Floats = NDArray[np.float32]


class Unfit(ValueError):
    """A model, a precision or a GPU that an engine does not take; a sentence says why."""


def check_plain(engine: str, config: GPTConfig) -> None:
    """Raise Unfit for a model that only the engines on the CPU and PyTorch's take."""
    other = [name for name in ("tanh_gelu", "untied_head", "window") if getattr(config, name)]
    if other:
        raise Unfit(f"the {engine} engine takes no model with {' and '.join(other)}")


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is opened with. None stands for each default.

    engine: a name of table.ENGINES; None takes the first that fits, see table.choose().
    part, simd, br, bc: as in attention(). slots: the most texts at a time, of all
    streams and threads that share the engine.
    weights: a Precision or its name. 'bf16' rounds the matrices to bfloat16; the native engine then reads
    half as many bytes of weights for each token. 'int8' rounds them to int8 with scales, and activations to
    21 bits; it reads a quarter. Both change the logits.
    kv_cache: a CachePrecision or its name. 'bf16' rounds all keys and values to bfloat16, which changes the
    logits; the native engine then keeps and reads half as many bytes of them.
    capacity: the longest context, in tokens; the model's block size by default. An endless model has none.
    device: 'cpu', 'cuda' or 'webgpu'; the latter two without simd and tile. All arithmetic is float32.
    kernel: part4's kernel in the torch engine on CUDA, as in attention().
    threads: the most that it uses; the torch engine then sets PyTorch's. None takes PyTorch's number where
    torch is imported, else processor.threads().
    draft: guesses the next tokens, in the native engine of one to four texts, in the cuda engine of as many
    as have a cluster each. It changes no text. 'auto' takes the checkpoint's own if any, 'off' none. Else a
    Draft, a model's name or a draft's file.
    Raises TypeError or ValueError naming the wrong argument.
    """

    engine: str | None = None
    part: str = "part4"
    simd: str = "auto"
    br: int | None = None
    bc: int | None = None
    weights: Precision = Precision.FP32
    kv_cache: CachePrecision = CachePrecision.FP32
    slots: int = 2
    capacity: int | None = None
    device: str = "cpu"
    kernel: str | None = None
    threads: int | None = None
    draft: Draft | str = "auto"

    def __post_init__(self) -> None:
        set_defaults(self)
        set_whole(self, "slots", "capacity", "threads")
        set_field = functools.partial(object.__setattr__, self)
        set_field("weights", member(Precision, "weights", self.weights))
        set_field("kv_cache", member(CachePrecision, "kv_cache", self.kv_cache))
        br, bc = default_tile.checked_sides(self.br, self.bc)
        set_field("br", br)
        set_field("bc", bc)
        parts.resolve_simd(self.simd)
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"slots is {self.slots}; it must be from 1 to {MOST_SLOTS}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")
        parts.check_compatible(self.row, self.device, kernel=self.kernel, br=br, bc=bc, simd=self.simd)
        if self.kernel is not None and self.device == "cuda":
            parts.one_of("kernel", self.kernel, KERNELS)

    def context(self, config: GPTConfig) -> int:
        """The capacity for a model. Raises ValueError if it is more than the model's block size."""
        longest = ENDLESS if config.endless else config.block_size
        if self.capacity is not None and not 1 <= self.capacity <= longest:
            must = f"it must be from 1 to block_size={config.block_size}"
            raise ValueError(f"capacity is {self.capacity}; {must}")
        return longest if config.endless else self.capacity or longest

    @functools.cached_property
    def row(self) -> Part:
        """The part's row."""
        return parts.check_part(self.part)


class Engine(Protocol):
    """Holds texts in numbered slots, each with its own cache and sampling, and continues them.

    A slot's tokens do not depend on what other slots hold.
    """

    name: str
    device: str  # one of DEVICES
    config: GPTConfig
    slots: int  # the most texts that the engine holds
    free: list[int]  # those that no Writer uses, a heap
    capacity: int  # tokens of context of each text, at most block_size, or ENDLESS
    fast_in_step: bool  # whether texts of equal length in neighbouring slots are written faster
    tokens_at_once: int  # the most of each text that are worth asking for in a call of write()

    @property
    def description(self) -> str:
        """What computes the texts, in a line for people."""

    def set_sampling(self, slot: int, sampling: Sampling, logprobs: int | None = None) -> None:
        """Set how the slot's tokens are chosen from now on; at first it is by Sampling().

        logprobs: keep these tokens' log-probabilities, each with so many alternatives; None keeps none.
        Those that were not taken are dropped.
        """

    def take_logprobs(self, slot: int) -> Sequence[tuple[int, float, Sequence[tuple[int, float]]]]:
        """The fields of each TokenLogprob kept since the last call, in the order of the tokens."""

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        """Begin to replace the slot's tokens by `ids`, 1 to `capacity` of them, which read() reads.

        continues: the penalties still count the text's earlier tokens. top: also keep the log-probabilities
        of ids[1:], each with `top` alternatives. It changes no token.
        """

    def read(self, slot: int, seconds: float = math.inf) -> bool:
        """Read for about this long, at least one piece of work; return whether all tokens are read.

        The slot holds no text before. An engine may read all in one call.
        """

    def drop(self, slot: int) -> None:
        """Cancel a begin() and free its memory."""

    def write(self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None) -> Tokens:
        """Choose a token for each of these slots and append it, for each row of uniforms.

        uniforms: (rows, slots) in [0, 1). They decide the choices. seconds: no further row begins after about
        this long; by default so soon that Ctrl-C takes effect. It writes at least one row, and stops when a
        slot is full. A slot with capacity + 1 tokens, whose last one is not yet read, must be read again
        first. Returns the tokens of the rows that were written.
        """

    def copy(self, source: int, *targets: int) -> None:
        """Copy a slot's text, without log-probabilities, to others, which keep their sampling."""

    def logits(self, slot: int) -> list[float]:
        """The slot's latest logits (V,). Its last token was, or its next one will be, chosen from them."""


def member(enum: type[Name], name: str, value: str) -> Name:
    """The member of an enum with this name. Raises ValueError naming the argument if there is none."""
    parts.one_of(name, value, list(enum))
    return enum(value)


def rows_of(uniforms: ArrayLike, count: int) -> NDArray[np.float64]:
    """The numbers (rows, count) of a call of write(). Raises ValueError unless a row has so many."""
    numbers = np.ascontiguousarray(uniforms, float)
    if numbers.ndim != 2 or numbers.shape[1] != count:
        must = f"it must be the number of slots, {count}"
        raise ValueError(f"the number of uniforms is {numbers.shape[-1]}; {must}")
    return numbers
