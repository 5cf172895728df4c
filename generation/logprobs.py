"""Log-probabilities of tokens, from the model's logits before any sampling setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_TOP = 5  # alternatives of a token


class TokenLogprob(NamedTuple):
    """A token's log-probability in nats. top: (token, log-probability), likeliest first, ties by id."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def of_logits(logits: NDArray[np.float32], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The log-probability, in float64, of a token in each row of logits (B, V), and `top` alternatives."""
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    likeliest = np.argsort(-rows, axis=-1, kind="stable")[:, :top]
    return [
        TokenLogprob(token, float(row[token]), list(zip(ids.tolist(), row[ids].tolist())))
        for token, row, ids in zip(tokens, rows, likeliest)
    ]
