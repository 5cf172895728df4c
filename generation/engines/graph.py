"""The torch engine's step on a GPU as a CUDA graph, over caches of a fixed length.

A text's keys fill its cache from the last row upwards, so that its query, which stands at the last key, sees
those of its document. The first row takes the keys of slots that do not write.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext.rules import Rules
from shakespeare.model.gpt import GPT, Attend
from shakespeare.model.kv_cache import KVCache


class Step:
    """Reads the pending token of each of the first n slots, unless it is -1. It replaces the model's caches.

    lengths, pending: (n,). logits: (n, V). All are on the device, and the step updates lengths and logits.
    flash: part 4's operator on CUDA; for None the model's attention takes the rule `documents`.
    """

    length = 0  # positions() knows those of the texts

    def __init__(
        self,
        model: GPT,
        caches: Sequence[KVCache],
        lengths: Tensor,
        pending: Tensor,
        logits: Tensor,
        flash: Callable[..., Any] | None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.lengths = lengths
        self.pending = pending
        self.logits = logits
        self.flash = flash
        self.last = caches[0].k.shape[2] - 1  # row of a cache

    def __call__(self) -> None:
        writes = (self.pending >= 0) & (self.lengths < self.last)
        self.rows = self.last - self.lengths.where(writes, self.last)
        first = self.rows.where(writes, self.last)[:, None]  # row that the query sees, (n, 1)
        self.places = self.last - first
        self.documents = (torch.arange(self.last + 1, device=first.device) >= first).long()
        extent = torch.cat([first, first * 0 + self.last + 1], 1).int()
        self.extents = torch.stack([extent * 0, extent], 1)  # the numbers grow; the query's
        self.slots = torch.arange(len(writes), device=writes.device)
        self.layers = iter(self.caches)
        logits = self.model(self.pending.clamp(min=0)[:, None], [self for _ in self.caches])[:, 0]
        self.logits.copy_(logits.where(writes[:, None], self.logits))
        self.lengths += writes

    def positions(self, count: int) -> Tensor:
        return self.places

    def attend(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v, (n, H, 1, d), to the next layer's cache and let q attend to it."""
        cache = next(self.layers)
        filled = []
        for buffer, new in ((cache.k, k), (cache.v, v)):
            buffer[self.slots, :, self.rows] = new[:, :, 0].to(buffer.dtype)
            filled.append(buffer[: len(self.slots)].to(q.dtype))
        if self.flash is None:
            return attend(q, *filled, documents=self.documents)
        rules = Rules(documents=self.documents, extents=self.extents)
        return self.flash(q, *filled, False, None, None, *rules.arguments())[0]


def captured(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """A step as a CUDA graph in a pool of memory. It runs once before: libraries allocate, kernels compile.

    A call launches the step and waits for the one before, so that the GPU is never idle. The graph keeps the
    tensors that the step makes; what it has from before must stay.
    """
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    ended = torch.cuda.Event()

    def replay() -> None:
        graph.replay()
        ended.synchronize()
        ended.record()

    return replay
