"""The torch engine's step on a GPU as a CUDA graph: many texts read a token each and choose the next.

A graph launches all kernels of a token at once, so lengths, slots and uniform numbers are in GPU memory.
"""

import ctypes
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.cuda.gpu import FORMATS, Module, gpu, launch
from shakespeare.attention_ext.parts import Dtype, Part
from shakespeare.generation.engines.layouts import SOURCES
from shakespeare.generation.sampling import Sampling, drawn
from shakespeare.model.gpt import GPT
from shakespeare.model.kv_cache import KVCache

SECONDS = 0.005  # of a call of write() by default, so that Ctrl-C takes effect soon
ROWS = 256  # the most tokens of each text in a call of write()
SMALL = 128  # threads of a block where there are many, so that all run at a time
LARGE = 512  # where there are few, so that a long text's keys are read at once
WIDEST = 128  # the widest head of csrc/cuda/attend.cu
MOST_GRAPHS = 32  # kept: by the number of texts and by sampling
FIRST_ROW_SECONDS = 1e-3  # the guess before one was measured


class Step(ctypes.Structure):
    """struct Step of csrc/cuda/attend.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "keys", "values", "slots", "lengths", "out")),
        *((name, ctypes.c_int) for name in ("heads", "capacity", "row")),
        ("scale", ctypes.c_float),
    ]


class Texts:
    """Some texts in the slots of an engine, as a graph sees them, with room for ROWS rows.

    at: their slots (n,). lengths: their tokens in the cache (n,). pending: the tokens to be read next (n,).
    logits: (n, V), the latest. uniforms: (ROWS, n). chosen: (ROWS, n). row: the next one, (1,).
    """

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        self.at, self.lengths, self.pending = zeros(count), zeros(count), zeros(count)
        self.logits = zeros(count, vocab_size, dtype=torch.float32)
        self.uniforms = zeros(ROWS, count, dtype=torch.float64)
        self.chosen, self.row = zeros(ROWS, count), zeros(1)


class SlotCache:
    """Replaces a layer's KVCache: some texts, each with its own length. slotted: by PyTorch's attention."""

    length = 0  # positions() knows those of the texts

    def __init__(self, cache: KVCache, texts: Texts, slotted: bool) -> None:
        self._k, self._v, self._texts, self._slotted = cache.k, cache.v, texts, slotted

    def positions(self, count: int) -> Tensor:
        return self._texts.lengths[:, None]

    def attend(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (by_pytorch if self._slotted else by_kernel)(q, k, v, self._k, self._v, self._texts)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, texts: Texts) -> Tensor:
    """Append k and v, (n, H, 1, d), to the texts' caches and let q attend to them, by csrc/cuda/attend.cu."""
    n, heads, _, d = q.shape
    out = torch.empty(n, 1, heads, d, device=q.device)
    pointers = (t.data_ptr() for t in (q, k, v, keys, values, texts.at, texts.lengths, out))
    step = Step(*pointers, heads, keys.shape[2], q.stride(0), 1 / (math.sqrt(d) * math.log(2)))
    threads = LARGE if n * heads <= 2 * gpu(q.device.index).multiprocessors else SMALL
    function, _ = kernel(d, Dtype.of(keys.dtype), threads, q.device.index)
    launch(function, n * heads, threads, step)
    return out.transpose(1, 2)


@functools.cache
def kernel(head_dim: int, dtype: Dtype, threads: int, index: int) -> tuple[Any, Module]:
    """attend.cu on a GPU, which is the current one, and the module that keeps it alive."""
    module = Module(source(head_dim, dtype, threads, gpu(index).capability))
    return module.function("attend"), module


def source(head_dim: int, dtype: Dtype, threads: int, capability: tuple[int, int]) -> nvrtc.Source:
    """attend.cu for these macros."""
    macros = {"FORMAT": FORMATS[dtype], "HEAD_DIM": head_dim, "THREADS": threads}
    return nvrtc.Source("attend.cu", f"sm_{capability[0]}{capability[1]}", macros, SOURCES)


def by_pytorch(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, texts: Texts) -> Tensor:
    """As by_kernel(), in PyTorch over the whole capacity: part 0."""
    keys[texts.at, :, texts.lengths] = k[:, :, 0].to(keys.dtype)
    values[texts.at, :, texts.lengths] = v[:, :, 0].to(values.dtype)
    K, V = keys[texts.at].to(q.dtype), values[texts.at].to(q.dtype)  # (n, H, capacity, d)
    scores = q @ K.transpose(2, 3) / math.sqrt(q.shape[3])  # (n, H, 1, capacity)
    hidden = torch.arange(keys.shape[2], device=q.device) > texts.lengths[:, None, None, None]
    return scores.masked_fill(hidden, -math.inf).softmax(3) @ V


def serves(config: Any, part: Part, named: str | None) -> bool:
    """Whether Graphs can run a part: PyTorch's, or part 4 without a kernel by name, if attend.cu takes it."""
    if config.endless:
        return False
    if part.operator is None:
        return part.file is None
    return named is None and config.head_dim % 4 == 0 and config.head_dim <= WIDEST


class Graphs:
    """The graphs of an engine's steps for 1, 2, 4, 8 ... texts, each captured on first use.

    caches: of the layers; their last slot belongs to no text and fills up the texts of a graph.
    """

    def __init__(self, model: GPT, caches: Sequence[KVCache], part: Part) -> None:
        self._model, self._caches, self._slotted = model, caches, part.operator is None
        self._device = caches[0].k.device
        self._texts: dict[int, Texts] = {}
        self._captured: dict[tuple[int, Sampling | None], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._row_seconds: dict[int, float] = {}  # of a row, by the number of texts of the graph

    def read(self, slots: Sequence[int], lengths: Sequence[int], pending: Sequence[int]) -> Tensor:
        """Append the pending token of each text to its slot; return the logits after them, (n, V)."""
        texts = self._begin(slots, lengths, pending)
        self._graph(texts, None).replay()
        return texts.logits[: len(slots)]

    def write(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        pending: Sequence[int],
        uniforms: NDArray[np.float64],
        sampling: Sampling,
        seconds: float,
    ) -> tuple[NDArray[np.int64], Tensor]:
        """Let each text, whose last token is pending, write a token for each row of uniforms (rows, n).

        Returns the tokens, (rows that were written, n), -1 as in sampling.drawn(), and the logits of the last
        row, (n, V). seconds: the most, at least one row.
        """
        texts, n = self._begin(slots, lengths, pending), len(slots)
        graph, size = self._graph(texts, sampling), len(texts.at)
        fit = seconds / self._row_seconds.get(size, FIRST_ROW_SECONDS)
        rows = int(max(1, min(len(uniforms), ROWS, fit)))
        texts.uniforms[:rows, :n] = torch.from_numpy(uniforms[:rows]).to(self._device)
        start = time.perf_counter()
        for _ in range(rows):
            graph.replay()
        chosen = texts.chosen[:rows, :n].cpu().numpy()
        self._row_seconds[size] = (time.perf_counter() - start) / rows
        return chosen, texts.logits[:n]

    def _begin(self, slots: Sequence[int], lengths: Sequence[int], pending: Sequence[int]) -> Texts:
        """These texts, filled up to a power of two by the slot that belongs to none."""
        size = 1 << (len(slots) - 1).bit_length()
        if size not in self._texts:
            self._texts[size] = Texts(size, self._model.config.vocab_size, self._device)
        texts, more = self._texts[size], [0] * (size - len(slots))
        spare = len(self._caches[0].k) - 1
        given = [[*slots, *(spare for _ in more)], [*lengths, *more], [*pending, *more]]
        texts.at[:], texts.lengths[:], texts.pending[:] = torch.tensor(given, device=self._device)
        texts.row.zero_()
        return texts

    def _graph(self, texts: Texts, sampling: Sampling | None) -> torch.cuda.CUDAGraph:
        """The graph of a step of these texts, and of the choice, unless sampling is None."""
        key = (len(texts.at), sampling)
        if key in self._captured:
            return self._captured[key]
        if len(self._captured) >= MOST_GRAPHS:
            del self._captured[next(iter(self._captured))]
        kept = [t.clone() for t in (texts.at, texts.lengths, texts.pending)]
        texts.at.fill_(len(self._caches[0].k) - 1)  # the steps before the capture must change no text
        texts.lengths.zero_()
        texts.pending.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(texts, sampling)  # libraries allocate, kernels are compiled
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(texts, sampling)
        self._pool = graph.pool()
        for t, before in zip((texts.at, texts.lengths, texts.pending), kept):
            t.copy_(before)
        texts.row.zero_()
        self._captured[key] = graph
        return graph

    def _step(self, texts: Texts, sampling: Sampling | None) -> None:
        """Read the pending tokens; choose the next ones."""
        caches: Any = [SlotCache(cache, texts, self._slotted) for cache in self._caches]
        texts.logits.copy_(self._model(texts.pending[:, None], caches)[:, 0])
        texts.lengths += 1
        if sampling is not None:
            tokens = drawn(texts.logits.double(), texts.uniforms.index_select(0, texts.row)[0], sampling)
            texts.chosen.index_copy_(0, texts.row, tokens[None])
            texts.pending.copy_(tokens.clamp(min=0))
            texts.row += 1
