"""The torch engine: the PyTorch model, with any attention, rounded to any precision, on any device."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shakespeare.attention_ext import attention, extension, operator
from shakespeare.attention_ext.parts import CachePrecision, Dtype, Part, Precision
from shakespeare.generation import logprobs, sampling
from shakespeare.generation.engines.engine import Engine, member, rows_of
from shakespeare.generation.engines.graph import ROWS, SECONDS, Graphs, serves
from shakespeare.generation.logprobs import TokenLogprob
from shakespeare.generation.sampling import Sampling
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.gpt import GPT, Attend
from shakespeare.model.kv_cache import KVCache
from shakespeare.model.rounding import in_bf16, in_int8

# How a model is rounded to each precision. The result is kept in float32.
ROUNDINGS: dict[Precision, Callable[[GPT], GPT]] = {
    Precision.FP32: lambda model: model,
    Precision.BF16: in_bf16,
    Precision.INT8: in_int8,
}
# The type of the cached keys and values.
DTYPES = {CachePrecision.FP32: torch.float32, CachePrecision.BF16: torch.bfloat16}


MOST_UNCOUNTED = 64  # calls whose tokens wait to be counted


class TorchEngine:
    """Runs the PyTorch model on its device. Neighbouring slots with equally many tokens are read together.

    dtype: the type of the cached keys and values. part: if its steps on a GPU are CUDA graphs, see graph.py;
    in these, texts of one sampling without penalties, biases and log-probabilities are also chosen there.
    Other tokens are chosen on the CPU.
    """

    name = "torch"
    fast_in_step, tokens_at_once = True, 1

    def __init__(
        self,
        model: GPT,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        simd_name: str | None = None,
        part: Part | None = None,
    ) -> None:
        self.model, self.config, self.slots, self.capacity = model, model.config, slots, capacity
        self.simd_name, self.threads = simd_name, torch.get_num_threads()
        c, self._device = model.config, model.transformer.wte.weight.device
        sizes = (slots + (part is not None), c.n_head, capacity, c.head_dim)
        self._caches = [KVCache(*sizes, dtype, self._device) for _ in range(c.n_layer)]
        self._graphs: Graphs | None = None
        if part is not None:
            self._graphs = Graphs(model, self._caches, part)
            self.fast_in_step, self.tokens_at_once = False, ROWS
        self._lengths = [0] * slots  # tokens in the cache
        self._pending = [-1] * slots  # the chosen token that is not yet read; -1 for none
        self._seen: list[set[int]] = [set() for _ in range(slots)]
        self._written: list[Counter[int]] = [Counter() for _ in range(slots)]  # since the prompt
        self._uncounted: list[list[NDArray[np.int64]]] = [[] for _ in range(slots)]  # tokens for these two
        self._samplings = [Sampling()] * slots
        self._tops: list[int | None] = [None] * slots
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(slots)]  # not taken yet
        self._begun: dict[int, tuple[Sequence[int], bool, int | None]] = {}  # prompts to be read
        self._logits = torch.empty(slots, c.vocab_size, device=self._device)
        self.choose: Callable[..., list[int]] = sampling.choose  # lab/profile.py wraps it in a timer

    def uniforms(self, seed: int) -> Callable[[int], NDArray[np.float64]]:
        generator = torch.Generator().manual_seed(seed)
        return lambda count: torch.rand(count, dtype=torch.float64, generator=generator).numpy()

    def set_sampling(self, slot: int, sampling: Sampling, logprobs: int | None = None) -> None:
        self._samplings[slot], self._tops[slot] = sampling, logprobs
        self._logprobs[slot] = []

    def take_logprobs(self, slot: int) -> list[TokenLogprob]:
        taken, self._logprobs[slot] = self._logprobs[slot], []
        return taken

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        self._begun[slot] = (ids, continues, top)

    @torch.inference_mode()
    def read(self, slot: int, seconds: float = math.inf) -> bool:
        self._count(slot)
        ids, continues, top = self._begun.pop(slot)
        if not continues:
            self._seen[slot].clear()
            self._written[slot].clear()
            self._logprobs[slot] = []
        self._seen[slot].update(ids)
        self._lengths[slot] = 0
        if top is not None:  # a separate pass, so that the text's logits do not depend on it
            caches = [cache.of(slot, slot + 1, 0) for cache in self._caches]
            logits = self.model(torch.tensor([ids], device=self._device), caches)[0, :-1]
            self._logprobs[slot] += logprobs.of_logits(logits.cpu().numpy(), ids[1:], top)
        self._append(slot, [ids])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # its time counts for the prompt, not for the next token
        return True

    def drop(self, slot: int) -> None:
        self._begun.pop(slot, None)

    @torch.inference_mode()
    def write(
        self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None
    ) -> NDArray[np.int64]:
        numbers, at = rows_of(uniforms, len(slots)), list(slots)
        waiting = [slot for slot in sorted(slots) if self._pending[slot] >= 0]
        if self._graphs and waiting:
            if full := [slot for slot in waiting if self._lengths[slot] == self.capacity]:
                raise ValueError(f"slot is {full[0]}; it must be read again: it is full")
            state = [[of[slot] for slot in waiting] for of in (self._lengths, self._pending)]
            if len(waiting) == len(at) and (sampling := self._shared_sampling(at)):
                return self._write_rows(at, numbers, sampling, SECONDS if seconds is None else seconds)
            self._logits[waiting] = self._graphs.read(waiting, *state)
            for slot in waiting:
                self._lengths[slot] += 1
        else:
            by_run = itertools.groupby(enumerate(waiting), lambda it: (it[1] - it[0], self._lengths[it[1]]))
            for _, run in by_run:
                together = [slot for _, slot in run]
                self._append(together[0], [[self._pending[slot]] for slot in together])
        for slot in at:
            self._count(slot)
        samplings, seen = [self._samplings[slot] for slot in at], [self._seen[slot] for slot in at]
        written = [self._written[slot] for slot in at]
        tokens = self.choose(self._logits[at].cpu(), numbers[0], samplings, seen, written)
        for slot, token in zip(at, tokens):
            self._pending[slot] = token
            self._seen[slot].add(token)
            self._written[slot][token] += 1
            if (top := self._tops[slot]) is not None:
                row = self._logits[slot : slot + 1].cpu().numpy()
                self._logprobs[slot] += logprobs.of_logits(row, [token], top)
        return np.array([tokens], np.int64)  # one step takes about as long as a native call

    def _shared_sampling(self, at: Sequence[int]) -> Sampling | None:
        """The sampling of these slots, if it is the same and nothing needs the host."""
        first = self._samplings[at[0]]
        bound = (first.presence_penalty, first.frequency_penalty, first.logit_bias)
        if first.repetition_penalty != 1 or any(bound):
            return None
        same = all(self._tops[slot] is None and self._samplings[slot] == first for slot in at)
        return first if same else None

    def _write_rows(
        self, at: list[int], numbers: NDArray[np.float64], sampling: Sampling, seconds: float
    ) -> NDArray[np.int64]:
        """write() by the graph of a sampling, for slots whose last token is pending."""
        assert self._graphs
        lengths, pending = ([of[slot] for slot in at] for of in (self._lengths, self._pending))
        most = self.capacity - max(lengths)
        chosen, logits = self._graphs.write(at, lengths, pending, numbers[:most], sampling, seconds)
        if (chosen < 0).any():
            raise ValueError("logits hold NaN, or the largest is infinite; they must be numbers")
        self._logits[at] = logits
        for slot, tokens, last in zip(at, chosen.T, chosen[-1].tolist()):
            self._lengths[slot] += len(chosen)
            self._pending[slot] = last
            self._uncounted[slot].append(tokens)
            if len(self._uncounted[slot]) == MOST_UNCOUNTED:
                self._count(slot)
        return chosen

    def _count(self, slot: int) -> None:
        """Count the tokens that graphs have chosen: most samplings do not need it."""
        for tokens in map(np.ndarray.tolist, self._uncounted[slot]):
            self._seen[slot].update(tokens)
            self._written[slot].update(tokens)
        self._uncounted[slot].clear()

    @torch.inference_mode()
    def copy(self, source: int, *targets: int) -> None:
        self._count(source)
        length, at = self._lengths[source], list(targets)
        for cache in self._caches:
            cache.k[at, :, :length] = cache.k[source, :, :length].clone()
            cache.v[at, :, :length] = cache.v[source, :, :length].clone()
        self._logits[at] = self._logits[source].clone()
        for target in targets:
            self._lengths[target] = length
            self._pending[target] = self._pending[source]
            self._uncounted[target].clear()
            self._seen[target] = set(self._seen[source])
            self._written[target] = Counter(self._written[source])
            self._begun.pop(target, None)

    def logits(self, slot: int) -> list[float]:
        return self._logits[slot].tolist()

    def _append(self, first: int, ids: Sequence[Sequence[int]]) -> None:
        """Append a row of ids to each slot from `first` on; these slots must hold equally many tokens."""
        end, length = first + len(ids), self._lengths[first]
        caches = [cache.of(first, end, length) for cache in self._caches]
        tokens = torch.tensor(ids, device=self._device)
        self._logits[first:end] = self.model(tokens, caches, last_only=True)[:, -1]
        self._lengths[first:end] = [length + len(ids[0])] * len(ids)
        self._pending[first:end] = [-1] * len(ids)


def open_torch(
    model: Checkpoint | GPT,
    part: Part,
    simd: str,
    tile: tuple[int | None, int | None],
    weights: Precision,
    kv_cache: CachePrecision,
    slots: int,
    capacity: int,
    device: str,
    kernel: str | None,
    threads: int | None,
) -> Engine:
    """The torch engine of a model; see open_engine()."""
    if threads is not None:
        torch.set_num_threads(threads)
    gpt = model if isinstance(model, GPT) else model.model
    options = {"br": tile[0], "bc": tile[1], "simd": simd, "kernel": kernel}
    attend: Attend = partial(attention, part.name, causal=True, **options)  # type: ignore[arg-type]
    placed = on_device(rounded(gpt.with_attention(attend), weights), device, part, kernel)
    name = extension.load(simd).simd_name() if part.operator and device == "cpu" else None
    in_graphs = device == "cuda" and serves(gpt.config, part, kernel)
    return TorchEngine(placed, slots, capacity, DTYPES[kv_cache], name, part if in_graphs else None)


def on_device(model: GPT, device: str, part: Part, kernel: str | None) -> GPT:
    """The model with its parameters moved to a device. The part's kernel is compiled first.

    Raises ValueError if the GPU cannot run the kernel, BuildError if there is no GPU or no compiler for it.
    """
    if device == "cpu":
        return model
    from shakespeare.attention_ext.cuda import gpu as driver

    driver.check_gpu()
    model = model.to(device)
    if part.operator:
        operator(part.name, "cuda")
        c, index = model.config, torch.cuda.current_device()
        for queries in (c.block_size, 1):  # a prompt, and each new token
            driver.compiled(kernel, c.n_head, queries, c.block_size, c.head_dim, Dtype.FP32, index)
    return model


def rounded(model: GPT, weights: str) -> GPT:
    """The model with matrices, for int8 also activations, rounded to a Precision; all stay float32.

    weights: a Precision or its name. Raises ValueError for another name.
    """
    return ROUNDINGS[member(Precision, "weights", weights)](model)


def with_rounded_cache(attend: Attend, kv_cache: str) -> Attend:
    """The attention over keys and values rounded to a CachePrecision; all stay float32.

    kv_cache: a CachePrecision or its name. Raises ValueError for another name.
    """
    dtype = DTYPES[member(CachePrecision, "kv_cache", kv_cache)]
    if dtype is torch.float32:
        return attend
    return lambda q, k, v: attend(q, k.to(dtype).float(), v.to(dtype).float())
