"""Log-probabilities of tokens, from the model's logits before any sampling setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_TOP = 20  # alternatives of a token, as in a chat of OpenAI's API


class TokenLogprob(NamedTuple):
    """A token's log-probability in nats. top: (token, log-probability), likeliest first, ties by id."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def check_top(name: str, top: int | None) -> None:
    """Raise ValueError unless a token's log-probability may have so many alternatives; None: it has none."""
    if top is not None and not 0 <= top <= MOST_TOP:
        raise ValueError(f"{name} is {top}; it must be from 0 to {MOST_TOP}")


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
