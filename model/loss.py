"""The loss of a model over a text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.model.gpt import GPT


@torch.no_grad()
def evaluate(model: GPT, ids: Tensor, batch_chars: int = 16_384, block_size: int | None = None) -> float:
    """Mean loss in nats per token, each predicted once from the earlier tokens of its window.

    ids, on any device: windows (n, T + 1), whose last T tokens are predicted, or a text (N,). A text's
    windows of block_size tokens, by default the model's, do not overlap; the last may be shorter. Raises
    ValueError if N < 2.
    """
    if ids.shape[-1] < 2:
        raise ValueError(f"ids has {ids.shape[-1]} tokens; it must have at least 2")
    ids = ids.to(next(model.parameters()).device)
    if ids.ndim == 2:
        rows = ids.split(max(1, batch_chars // ids.shape[1]))
        batches = [(windows[:, :-1], windows[:, 1:]) for windows in rows]
    else:
        T = block_size or model.config.block_size
        inputs, targets = ids[:-1], ids[1:]
        whole, count = len(inputs) // T * T, max(1, batch_chars // T)
        batches = list(zip(inputs[:whole].view(-1, T).split(count), targets[:whole].view(-1, T).split(count)))
        batches.append((inputs[None, whole:], targets[None, whole:]))
    was_training = model.training
    model.eval()
    total = sum(
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").double()
        for x, y in batches
        if x.numel()
    )
    model.train(was_training)
    return float(total) / sum(y.numel() for _, y in batches)
