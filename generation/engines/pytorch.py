"""The torch engine: the PyTorch model, with any attention, rounded to any precision, on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shakespeare.attention_ext import attention, extension, operator
from shakespeare.attention_ext.parts import CachePrecision, Dtype, Part, Precision
from shakespeare.generation import sampling
from shakespeare.generation.engines.engine import Engine, EngineOptions, Tokens, member
from shakespeare.generation.engines.graph import ROWS, SECONDS, Graphs, serves
from shakespeare.generation.engines.slots import Prompt, Slots, numbers_only
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


class TorchEngine(Slots):
    """Runs the PyTorch model on its device. Neighbouring slots with equally many tokens are read together.

    part: see graph.py for those whose steps on a GPU are CUDA graphs. There, texts of one sampling without
    penalties, biases and log-probabilities are also chosen. Other tokens are chosen on the CPU.
    """

    name, fast_in_step, tokens_at_once = "torch", True, 1

    def __init__(self, model: GPT, options: EngineOptions, part: Part | None = None) -> None:
        c, slots = model.config, options.slots
        super().__init__(c, slots, options.context(c))
        self.model = model
        self.description = f"Attention by {options.row.summary}"
        self._device = model.transformer.wte.weight.device
        self.device = self._device.type
        keys = self.capacity if c.window is None else c.window - 1
        sizes = (slots + (part is not None), c.n_head, keys, c.head_dim)
        kind = DTYPES[options.kv_cache], self._device, c.endless
        self._caches = [KVCache(*sizes, *kind) for _ in range(c.n_layer)]
        self._graphs: Graphs | None = None
        if part is not None:
            self._graphs = Graphs(model, self._caches, part)
            self.fast_in_step, self.tokens_at_once = False, ROWS
        self._counts = np.zeros((slots, 2, c.vocab_size), np.int64)  # of each token; since the prompt
        self._kept.append(self._counts)
        self._uncounted: list[list[NDArray[np.int64]]] = [[] for _ in range(slots)]  # tokens for these
        self._logits = torch.empty(slots, c.vocab_size, dtype=torch.float32, device=self._device)
        self.choose: Callable[..., list[int]] = sampling.choose  # lab/profile.py wraps it in a timer

    @torch.inference_mode()
    def _read_piece(self, slot: int, prompt: Prompt) -> tuple[int, NDArray[np.float32] | None]:
        ids = prompt.ids
        self._count(slot)
        if not prompt.continues:
            self._counts[slot] = 0
        np.add.at(self._counts[slot, 0], ids, 1)
        kept = None
        if prompt.top is not None:  # a separate pass, so that the text's logits do not depend on it
            caches = [cache.of(slot, slot + 1, 0) for cache in self._caches]
            kept = self.model(torch.tensor([ids], device=self._device), caches)[0].cpu().numpy()
        self._append(slot, [ids[-(self.config.reach or len(ids)) :]])  # what is before decides nothing
        if self.device == "cuda":
            torch.cuda.synchronize(self._device)  # its time counts for the prompt, not for the next token
        return len(ids), kept

    @torch.inference_mode()
    def write(self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None) -> Tokens:
        places, numbers = self._asked(slots, uniforms, seconds)
        with self._lock:
            self._held_by(places)
            at, waiting = places.tolist(), sorted(places[self._pending[places] >= 0].tolist())
            if self._graphs and waiting:
                if len(waiting) == len(at) and (sampling := self._shared_sampling(at)):
                    seconds = SECONDS if seconds is None else seconds
                    return self._write_rows(at, numbers, sampling, seconds)
                self._logits[waiting] = self._graphs.read(waiting, *self._state(waiting))
                self._lengths[waiting] += 1
            else:
                runs = itertools.groupby(enumerate(waiting), lambda it: (it[1] - it[0], self._lengths[it[1]]))
                for _, run in runs:
                    together = [slot for _, slot in run]
                    self._append(together[0], [[int(self._pending[slot])] for slot in together])
            return self._write_row(at, numbers[0])

    def _write_row(self, at: list[int], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        """Choose a token for each of these slots on the CPU."""
        for slot in at:
            self._count(slot)
        samplings = [self._samplings[slot] for slot in at]
        adjusted = any(sampling.adjusts for sampling in samplings)
        counts = torch.from_numpy(self._counts[at]) if adjusted else None
        tokens = self.choose(self._logits[at].cpu(), numbers, samplings, counts)
        self._counts[at, :, tokens] += 1
        chosen = np.array([tokens], np.int64)  # one step takes about as long as a native call
        self._pending[at] = tokens
        if self._are_scored(at):
            self._score(at, chosen, self._logits[at].cpu().numpy()[None])
        return chosen

    def _state(self, at: Sequence[int]) -> list[list[int]]:
        """The lengths of these slots, and their tokens that are not yet read."""
        return [of[at].tolist() for of in (self._lengths, self._pending)]

    def _shared_sampling(self, at: Sequence[int]) -> Sampling | None:
        """The sampling of these slots, if it is the same and nothing needs the host."""
        first = self._samplings[at[0]]
        same = not self._are_scored(at) and all(self._samplings[slot] == first for slot in at)
        return first if same and not first.adjusts else None

    def _write_rows(
        self, at: list[int], numbers: NDArray[np.float64], sampling: Sampling, seconds: float
    ) -> NDArray[np.int64]:
        """write() by the graph of a sampling, for slots whose last token is pending."""
        assert self._graphs
        most = self.capacity - int(self._lengths[at].max())
        lengths, pending = self._state(at)
        chosen, logits = self._graphs.write(at, lengths, pending, numbers[:most], sampling, seconds)
        numbers_only(chosen)
        self._logits[at] = logits
        self._lengths[at] += len(chosen)
        self._pending[at] = chosen[-1]
        for slot, tokens in zip(at, chosen.T):
            self._uncounted[slot].append(tokens)
            if len(self._uncounted[slot]) == MOST_UNCOUNTED:
                self._count(slot)
        return chosen

    def _count(self, slot: int) -> None:
        """Count the tokens that graphs have chosen: most samplings do not need it."""
        for tokens in self._uncounted[slot]:
            self._counts[slot] += np.bincount(tokens, minlength=self.config.vocab_size)
        self._uncounted[slot].clear()

    @torch.inference_mode()
    def _copy(self, source: int, at: NDArray[np.int64]) -> None:
        self._count(source)
        length = int(self._lengths[source])
        for cache in self._caches:
            cache.k[at, :, :length] = cache.k[source, :, :length].clone()
            cache.v[at, :, :length] = cache.v[source, :, :length].clone()
        self._logits[at] = self._logits[source].clone()
        for target in at:
            self._uncounted[target].clear()

    def _logits_of(self, slot: int) -> NDArray[np.float32]:
        return self._logits[slot].cpu().numpy()

    def _append(self, first: int, ids: Sequence[Sequence[int]]) -> None:
        """Append a row of ids to each slot from `first` on; these slots must hold equally many tokens."""
        end, length = first + len(ids), int(self._lengths[first])
        caches = [cache.of(first, end, length) for cache in self._caches]
        tokens = torch.tensor(ids, device=self._device)
        self._logits[first:end] = self.model(tokens, caches, last_only=True)[:, -1]
        self._lengths[first:end] = length + len(ids[0])
        self._pending[first:end] = -1


def open_torch(model: Checkpoint | GPT, options: EngineOptions) -> Engine:
    """The torch engine of a model."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    gpt = model if isinstance(model, GPT) else model.model
    part, device, kernel = options.row, options.device, options.kernel
    tile = {"br": options.br, "bc": options.bc}
    attend: Attend = partial(attention, part.name, causal=True, simd=options.simd, kernel=kernel, **tile)
    placed = on_device(rounded(gpt.with_attention(attend), options.weights), device, part, kernel)
    in_graphs = device == "cuda" and serves(gpt.config, part, kernel)
    engine = TorchEngine(placed, options, part if in_graphs else None)
    if device == "cuda" and not part.file:
        from shakespeare.attention_ext.cuda import gpu

        engine.description = gpu.describe(part.name, kernel, gpt.config.head_dim)
    elif part.operator:
        helpers = extension.load(options.simd).simd_name()
        engine.description = extension.describe_helpers(helpers, torch.get_num_threads())
    return engine


def on_device(model: GPT, device: str, part: Part, kernel: str | None) -> GPT:
    """The model moved to a device; the part's kernels are compiled meanwhile.

    Raises ValueError if the GPU cannot run the kernel, BuildError if there is no GPU or no compiler for it.
    """
    if device == "cpu":
        return model
    from shakespeare.attention_ext.cuda import gpu as driver
    from shakespeare.attention_ext.cuda.launches import Sizes

    driver.check_gpu()
    if not part.operator:
        return model.to(device)
    c, index = model.config, torch.cuda.current_device()
    driver.activate(index)  # here first, for its errors
    with ThreadPoolExecutor(initializer=driver.activate, initargs=(index,)) as pool:
        calls = (Sizes(c.n_head, queries, c.block_size) for queries in (c.block_size, 1))  # a prompt, a token
        made = [pool.submit(driver.compiled, kernel, call, c.head_dim, Dtype.FP32, index) for call in calls]
        model = model.to(device)
        operator(part.name, "cuda")
        for each in made:
            each.result()
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
