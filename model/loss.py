"""The loss of a model over a text."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.model.gpt import GPT

UNCOUNTED = -100  # cross_entropy's ignore_index


@torch.no_grad()
def evaluate(
    model: GPT,
    ids: Tensor,
    batch_chars: int = 16_384,
    block_size: int | None = None,
    apart: int | None = None,
) -> float:
    """Mean loss in nats per token, each predicted once from the earlier tokens of its window.

    ids, on any device: windows (n, T + 1), whose last T tokens are predicted, or a text (N,). A text's
    windows of block_size tokens, by default the model's, do not overlap; the last may be shorter. An endless
    model sees all of the text that it can, unless its windows, of `apart` tokens, do not overlap either.
    Raises ValueError if N < 2.
    """
    if ids.shape[-1] < 2:
        raise ValueError(f"ids has {ids.shape[-1]} tokens; it must have at least 2")
    ids = ids.to(next(model.parameters()).device)
    if ids.ndim == 2:
        rows = ids.split(max(1, batch_chars // ids.shape[1]))
        batches = [(windows[:, :-1], windows[:, 1:]) for windows in rows]
    else:
        reach = 1 if apart else model.config.reach or 1
        T = apart or max(block_size or model.config.block_size, reach)  # shorter ones overlap more
        before = reach - 1  # tokens that a window sees ahead of its own
        windows = []
        for start in range(0, len(ids) - 1, T):
            seen = ids[max(0, start - before) : start + T + 1]
            targets = seen[1:].clone()
            targets[: min(before, start)] = UNCOUNTED
            windows.append((seen[:-1], targets))
        batches = []
        for _, alike in itertools.groupby(windows, key=lambda window: len(window[0])):
            inputs, targets = map(torch.stack, zip(*alike))
            batches += zip(*(ids.split(max(1, batch_chars // ids.shape[1])) for ids in (inputs, targets)))
    was_training = model.training
    model.eval()
    losses = (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") for x, y in batches)
    total = sum(loss.double() for loss in losses)
    model.train(was_training)
    return float(total) / sum(int((y != UNCOUNTED).sum()) for _, y in batches)
