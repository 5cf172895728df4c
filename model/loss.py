"""The loss of a model over a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.model.gpt import GPT


@torch.no_grad()
def evaluate(model: GPT, ids: Tensor, batch_chars: int = 16_384, block_size: int | None = None) -> float:
    """Mean loss in nats per token over contiguous windows of the block size, or of a smaller one.

    ids: (N,), N >= 2. Windows do not overlap; the last one may be shorter. Each token but the first is
    predicted once, from the earlier tokens of its window. Raises ValueError if N < 2.
    """
    if len(ids) < 2:
        raise ValueError(f"ids has {len(ids)} tokens; it must have at least 2")
    T = block_size or model.config.block_size
    inputs, targets = ids[:-1], ids[1:]
    whole = len(inputs) // T * T
    rows = max(1, batch_chars // T)
    batches = list(zip(inputs[:whole].view(-1, T).split(rows), targets[:whole].view(-1, T).split(rows)))
    batches.append((inputs[None, whole:], targets[None, whole:]))
    return _total(model, batches) / len(inputs)


@torch.no_grad()
def evaluate_windows(model: GPT, windows: Tensor, batch_chars: int = 16_384) -> float:
    """Mean loss in nats per token over windows (n, T + 1), whose first T tokens the model sees."""
    rows = max(1, batch_chars // windows.shape[1])
    batches = [(some[:, :-1], some[:, 1:]) for some in windows.split(rows)]
    return _total(model, batches) / windows[:, 1:].numel()


def _total(model: GPT, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The sum of the losses over batches of inputs (B, T) and targets (B, T)."""
    was_training = model.training
    model.eval()
    total = sum(
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").double()
        for x, y in batches
        if x.numel()
    )
    model.train(was_training)
    return float(total)
