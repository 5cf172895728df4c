"""The torch engine: the PyTorch model, with any attention, rounded to any precision, on any device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shakespeare.attention_ext import attention, extension, operator
from shakespeare.attention_ext.parts import CachePrecision, Dtype, Part, Precision
from shakespeare.generation import sampling
from shakespeare.generation.engines.engine import Engine, EngineOptions, Floats, member
from shakespeare.generation.engines.graph import Step, captured
from shakespeare.generation.engines.slots import Prompt, Slots
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

SECONDS = 0.005  # of a call of write() by default, so that Ctrl-C takes effect soon


class TorchEngine(Slots):
    """Runs the PyTorch model on its device. Neighbouring slots with equally many tokens are read together.

    graphs: whether steps are CUDA graphs, which write several tokens of any slots in a call.
    """

    name = "torch"

    def __init__(self, model: GPT, options: EngineOptions, graphs: bool = False) -> None:
        c = model.config
        slots = options.slots
        super().__init__(c, slots, options.context(c))
        self.model = model
        self.description = f"Attention by {options.row.summary}"
        self._device = model.transformer.wte.weight.device
        self.device = self._device.type
        self.fast_in_step = not graphs
        self.tokens_at_once = 256 if graphs else 1
        keys = self.capacity if c.window is None else c.window - 1
        sizes = (slots, c.n_head, keys + graphs, c.head_dim)
        dtype = DTYPES[options.kv_cache]
        self._caches = [KVCache(*sizes, dtype, self._device, c.endless) for _ in range(c.n_layer)]
        # By their number of slots; they share memory, as only one runs at a time.
        self._graphs: dict[int, Callable[[], None]] | None = {} if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs and self.device == "cuda" else None
        by_part4 = graphs and self.device == "cuda" and options.row.operator
        self._flash = operator("part4", "cuda", ruled=True) if by_part4 else None
        zeros = partial(torch.zeros, dtype=torch.int64, device=self._device)
        self._state = zeros(2, slots)  # lengths and pending tokens, for graphs
        self._counts = zeros(slots, 2, c.vocab_size)  # of each token; since the prompt
        self._logits = zeros(slots, c.vocab_size, dtype=torch.float32)
        self._kept += [self._counts, self._logits]
        self.choose: Callable[..., Tensor] = sampling.choose  # lab/profile.py wraps it in a timer

    @torch.inference_mode()
    def _read_piece(self, slot: int, prompt: Prompt) -> tuple[int, Floats | None]:
        ids = torch.tensor([prompt.ids], device=self._device)
        if not prompt.continues:
            self._counts[slot] = 0
        self._counts[slot, 0] += ids[0].bincount(minlength=self.config.vocab_size)
        kept = None
        if prompt.top is not None:  # a separate pass, so that the text's logits do not depend on it
            caches = [cache.slots(slot, slot + 1, 0) for cache in self._caches]
            kept = self.model(ids, caches)[0].cpu().numpy()
        self._append(slot, ids[:, -(self.config.reach or self.capacity) :])  # what is before decides nothing
        if self.device == "cuda":
            torch.cuda.synchronize(self._device)  # its time counts for the prompt, not for the next token
        return len(prompt.ids), kept

    @torch.inference_mode()
    def _write(
        self, at: NDArray[np.int64], numbers: NDArray[np.float64], seconds: float | None, scored: bool
    ) -> tuple[NDArray[np.int64], Floats]:
        end = time.monotonic() + (SECONDS if seconds is None else seconds)
        waiting = at[self._pending[at] >= 0]
        samplings = [self._samplings[slot] for slot in at]
        adjusted = any(sampling.adjusts for sampling in samplings)
        if self._graphs is None:
            step: Callable[[], None] = partial(self._append_pending, np.sort(waiting))
        else:
            step = self._graph(at)
        if scored or self._graphs is None:
            numbers = numbers[:1]
        places = torch.from_numpy(at).to(self._device)
        chosen: list[Tensor] = []
        for row in torch.from_numpy(numbers).to(self._device):
            if chosen or len(waiting):
                step()
            counts = self._counts[places] if adjusted else None
            tokens = self.choose(self._logits[places], row, samplings, counts)
            chosen.append(tokens)
            if adjusted:
                self._counts[places, :, tokens] += 1
            self._state[1, places] = tokens
            if time.monotonic() >= end:
                break
        rows = torch.stack(chosen)
        if not adjusted:  # a later setting may count them
            for counts in (self._counts[:, 0], self._counts[:, 1]):
                counts.index_put_((places.expand_as(rows), rows), torch.ones_like(rows), accumulate=True)
        every = self._logits[places if scored else []].cpu().numpy()[None]
        return rows.cpu().numpy(), every

    def _graph(self, places: NDArray[np.int64]) -> Callable[[], None]:
        """The step of these slots, as a graph of the first 1, 2, 4, 8 ...; no other has a pending token."""
        assert self._graphs is not None
        count = min(self.slots, 1 << int(places.max()).bit_length())
        self._state[1] = -1
        if count not in self._graphs:
            lengths, pending = self._state[:, :count]
            step = Step(self.model, self._caches, lengths, pending, self._logits[:count], self._flash)
            self._graphs[count] = captured(step, self._pool)
        of_slots = np.stack([self._lengths[places], self._pending[places]])
        self._state[:, places] = torch.from_numpy(of_slots).to(self._state)
        return self._graphs[count]

    @torch.inference_mode()
    def _copy(self, source: int, at: NDArray[np.int64]) -> None:
        length = int(self._lengths[source])
        filled = slice(length) if self._graphs is None else slice(-length, None)
        for buffer in (buffer for cache in self._caches for buffer in (cache.k, cache.v)):
            buffer[at, :, filled] = buffer[source, :, filled].clone()

    def _logits_of(self, slot: int) -> Floats:
        return self._logits[slot].cpu().numpy()

    def _append_pending(self, slots: NDArray[np.int64]) -> None:
        """Read the pending tokens of these slots, of neighbours with equally many tokens together."""
        changes = (np.diff(slots) > 1) | (np.diff(self._lengths[slots]) != 0)
        for run in np.split(slots, np.flatnonzero(changes) + 1):
            self._append(run[0], torch.from_numpy(self._pending[run, None]).to(self._device))

    def _append(self, first: int, ids: Tensor) -> None:
        """Append a row of ids to each slot from `first` on; these slots must hold equally many tokens."""
        count, new = ids.shape
        end = first + count
        length = int(self._lengths[first])
        caches = [cache.slots(first, end, length) for cache in self._caches]
        if self._graphs is not None:  # a prompt is read, to the last rows: see graph.py
            for cache in caches:
                cache.k = cache.k[:, :, -new:]
                cache.v = cache.v[:, :, -new:]
        self._logits[first:end] = self.model(ids, caches, last_only=True)[:, -1]
        self._lengths[first:end] = length + new
        self._pending[first:end] = -1


def open_torch(model: Checkpoint | GPT, options: EngineOptions) -> Engine:
    """The torch engine of a model."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    gpt = model if isinstance(model, GPT) else model.model
    part = options.row
    device = options.device
    kernel = options.kernel
    passed = {name: getattr(options, name) for name in ("simd", "kernel", "br", "bc")}
    attend: Attend = partial(attention, part.name, causal=True, **passed)
    placed = on_device(rounded(gpt.with_attention(attend), options.weights), device, part, kernel)
    # A step needs rules, which some kernels do not take.
    graphs = device == "cuda" and kernel is None and not part.file and not gpt.config.endless
    engine = TorchEngine(placed, options, graphs)
    if device == "cuda" and not part.file:
        from shakespeare.attention_ext.cuda import driver

        engine.description = driver.describe(part.name, kernel, gpt.config.head_dim)
    elif part.operator:
        helpers = extension.load(options.simd).simd_name()
        engine.description = extension.describe_helpers(helpers, torch.get_num_threads())
    return engine


def on_device(model: GPT, device: str, part: Part, kernel: str | None) -> GPT:
    """The model moved to a device, for which the part's kernel is compiled.

    Raises ValueError if the GPU cannot run the kernel, BuildError if there is no GPU or no compiler for it.
    """
    if device == "cpu":
        return model
    from shakespeare.attention_ext.cuda import driver
    from shakespeare.attention_ext.cuda.launches import Sizes

    driver.check_gpu()
    if not part.operator:
        return model.to(device)
    c = model.config
    index = torch.cuda.current_device()
    driver.activate(index)
    operator(part.name, "cuda")
    prompt = Sizes(c.n_head, c.block_size, c.block_size)
    driver.compiled(kernel, prompt, c.head_dim, Dtype.FP32, index)
    return model.to(device)


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
