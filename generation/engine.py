"""What computes the next token: the native decoder, or the PyTorch model. Both hold several texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from attention_ext import PARTS, attention, tiles
from attention_ext.parts import resolve_simd
from generation.sampling import Sampling, sample
from model.gpt import GPT, GPTConfig
from model.kv_cache import KVCache

ENGINES = ("native", "torch")
PATIENCE = 2e-3  # seconds after which Engine.write begins no other token, so that Ctrl-C is obeyed
BATCH_PATIENCE = 8e-3  # the same for several texts: for the first group of them that the native engine takes
WEIGHTS = ("fp32", "bf16")


class Engine(Protocol):
    """Texts in numbered slots, each with its cache, and a way to continue them."""

    name: str
    config: GPTConfig
    slots: int  # texts that it can hold
    capacity: int  # tokens of each, at most block_size

    def prefill(self, slot: int, ids: Sequence[int], continues: bool = False) -> None:
        """Replace what the slot holds by `ids`, 1 to `capacity` of them.

        continues: they are the end of the text that it held, whose tokens still count as seen.
        """

    def next(self, slots: Sequence[int], uniforms: Sequence[float], sampling: Sampling) -> list[int]:
        """Choose and append a token to each of these slots; the uniforms, in [0, 1), decide.

        A slot that holds capacity + 1 tokens, the last one not yet read, must be prefilled again.
        """

    def write(
        self, slots: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sampling
    ) -> list[list[int]]:
        """What next() gives for each row of uniforms in turn; when its patience is over the rest is left.

        At least the first row is used; none beyond the room in the slots.
        """

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` hold what slot `source` holds."""

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
    weights: 'bf16' rounds the matrices to bfloat16, which changes the logits; the native engine then reads
    half as much for each token.
    capacity: the longest context, in tokens; the model's block size unless given.
    The native engine uses as many threads as PyTorch is set to when this is called.
    Raises TypeError or ValueError naming an argument that is wrong, BuildError where the kernels cannot be
    compiled.
    """
    for name, number in (("br", br), ("bc", bc), ("slots", slots), ("capacity", capacity)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name} is a {type(number).__name__}; it must be a whole number")
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it must be one of {', '.join(PARTS)}")
    if engine not in (None, *ENGINES):
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine == "native" and PARTS[part].operator is None:
        raise ValueError(f"engine is 'native'; it must be 'torch' with {part}, which is PyTorch's attention")
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}; it must be one of {', '.join(WEIGHTS)}")
    if slots < 1:
        raise ValueError(f"slots is {slots}; it must be at least 1")
    longest = model.config.block_size
    if capacity is None:
        capacity = longest
    if not 1 <= capacity <= longest:
        raise ValueError(f"capacity is {capacity}; it must be from 1 to block_size={longest}")
    for name, size in (("br", br), ("bc", bc)):
        if size is not None and not 1 <= size < 2**63:
            raise ValueError(f"{name} is {size}; it must be at least 1 and fit 63 bits")
    if engine is None:
        engine = default_engine(part)
    if engine == "torch":
        model = model.with_attention(partial(attention, part, causal=True, br=br, bc=bc, simd=simd))
        return TorchEngine(model.in_bf16() if weights == "bf16" else model, slots, capacity)
    # Each of its threads runs the kernel alone.
    tuned = tiles.tile(resolve_simd(simd), 1, model.config.head_dim, capacity, causal=True)
    tile = (br or tuned[0], bc or tuned[1])
    return NativeEngine(model, part, simd, tile, weights, slots, capacity)


def default_engine(part: str) -> str:
    """The engine that a part has unless another is asked for."""
    if PARTS[part].operator is None:
        return "torch"
    from attention_ext.build import toolchain

    return "native" if toolchain.has_python_header() else "torch"


class TorchEngine:
    """The PyTorch model as it stands. Neighbouring slots that hold equally many tokens are read together."""

    name = "torch"

    def __init__(self, model: GPT, slots: int, capacity: int) -> None:
        self.model, self.config, self.slots, self.capacity = model, model.config, slots, capacity
        c = model.config
        self._caches = [KVCache(slots, c.n_head, capacity, c.head_dim) for _ in range(c.n_layer)]
        self._lengths = [0] * slots  # tokens in the cache
        self._pending = [-1] * slots  # the token that is chosen but not yet read; -1 for none
        self._seen: list[set[int]] = [set() for _ in range(slots)]
        self._logits = torch.empty(slots, c.vocab_size)
        self.choose: Callable[..., list[int]] = sample  # lab/profile.py puts a clock around it

    @torch.inference_mode()
    def prefill(self, slot: int, ids: Sequence[int], continues: bool = False) -> None:
        if not continues:
            self._seen[slot].clear()
        self._seen[slot].update(ids)
        self._lengths[slot] = 0
        self._read(slot, [ids])

    @torch.inference_mode()
    def next(self, slots: Sequence[int], uniforms: Sequence[float], sampling: Sampling) -> list[int]:
        waiting = [slot for slot in sorted(slots) if self._pending[slot] >= 0]
        for _, run in itertools.groupby(enumerate(waiting), lambda it: (it[1] - it[0], self._lengths[it[1]])):
            together = [slot for _, slot in run]
            self._read(together[0], [[self._pending[slot]] for slot in together])
        at = list(slots)
        tokens = self.choose(self._logits[at], uniforms, sampling, [self._seen[slot] for slot in at])
        for slot, token in zip(at, tokens):
            self._pending[slot] = token
            self._seen[slot].add(token)
        return tokens

    def write(
        self, slots: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sampling
    ) -> list[list[int]]:
        return [self.next(slots, uniforms[0], sampling)]  # which takes about as long

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        length = self._lengths[target] = self._lengths[source]
        for cache in self._caches:
            cache.k[target, :, :length] = cache.k[source, :, :length]
            cache.v[target, :, :length] = cache.v[source, :, :length]
        self._pending[target] = self._pending[source]
        self._logits[target] = self._logits[source]
        self._seen[target] = set(self._seen[source])

    @torch.inference_mode()
    def push(self, slot: int, token: int) -> None:
        pending = self._pending[slot]
        self._read(slot, [[token] if pending < 0 else [pending, token]])
        self._seen[slot].add(token)

    def logits(self, slot: int) -> Tensor:
        return self._logits[slot].clone()

    def _read(self, first: int, ids: Sequence[Sequence[int]]) -> None:
        """Append a row of ids to each slot from the first on; all of these hold equally many tokens."""
        end, length = first + len(ids), self._lengths[first]
        caches = [cache.of(first, end, length) for cache in self._caches]
        self._logits[first:end] = self.model(torch.tensor(ids), caches, last_only=True)[:, -1]
        self._lengths[first:end] = [length + len(ids[0])] * len(ids)
        self._pending[first:end] = [-1] * len(ids)


class NativeEngine:
    """The decoder of attention_ext/csrc/decoder.cpp: tokens are made without Python or PyTorch."""

    name = "native"

    def __init__(
        self, model: GPT, part: str, simd: str, tile: tuple[int, int], weights: str, slots: int, capacity: int
    ) -> None:
        from attention_ext import extension

        self.config, self.slots, self.capacity = model.config, slots, capacity
        tensors = {
            name: tensor.detach().contiguous().numpy()
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"  # tied to transformer.wte.weight
        }
        c = self.config
        self._decoder = extension.load_decoder(simd)(
            tensors,
            block_size=c.block_size,
            vocab_size=c.vocab_size,
            n_layer=c.n_layer,
            n_head=c.n_head,
            n_embd=c.n_embd,
            bf16=weights == "bf16",
            part=PARTS[part].operator,
            br=tile[0],
            bc=tile[1],
            slots=slots,
            capacity=capacity,
            threads=torch.get_num_threads(),
        )
        self._sampling: Sampling | None = None

    def prefill(self, slot: int, ids: Sequence[int], continues: bool = False) -> None:
        self._decoder.prefill(slot, ids, continues)

    def next(self, slots: Sequence[int], uniforms: Sequence[float], sampling: Sampling) -> list[int]:
        return self.write(slots, [uniforms], sampling)[0]

    def write(
        self, slots: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sampling
    ) -> list[list[int]]:
        if sampling is not self._sampling:
            s = self._sampling = sampling
            self._decoder.set_sampling(s.temperature, s.top_k or 0, s.top_p, s.min_p, s.repetition_penalty)
        return self._decoder.write(slots, uniforms, PATIENCE if len(slots) == 1 else BATCH_PATIENCE)

    def copy(self, source: int, target: int) -> None:
        self._decoder.copy(source, target)

    def push(self, slot: int, token: int) -> None:
        self._decoder.push(slot, token)

    def logits(self, slot: int) -> Tensor:
        return torch.tensor(self._decoder.logits(slot))

    def record(self, on: bool) -> None:
        """Whether what follows leaves spans; not at first."""
        self._decoder.record(on)

    def spans(self) -> list[tuple[str, int, int, int]]:
        """What the threads did since the last call, as (kind, thread, begin, end), thread by thread.

        begin, end: nanoseconds of time.monotonic_ns(). Thread 0 is the caller.
        """
        return self._decoder.spans()
