"""Log-probabilities of tokens, from the model's logits before any sampling setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOP = 5  # alternatives of a token


class TokenLogprob(NamedTuple):
    """A token's log-probability in nats, and the likeliest tokens in its place.

    top: (token, log-probability), likeliest first; equal ones in the order of their ids.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]

    def with_top(self, count: int) -> TokenLogprob:
        """The same with at most `count` alternatives."""
        return self._replace(top=self.top[:count])


def of_logits(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The log-probability of a token in each row of logits (B, V), each with `top` alternatives.

    The softmax is in float64. The native engine's token_logprob() does the same.
    """
    logprobs = logits.cpu().double().log_softmax(-1)
    likeliest = logprobs.sort(dim=-1, descending=True, stable=True)
    ids, values = (t[:, :top].tolist() for t in (likeliest.indices, likeliest.values))
    return [
        TokenLogprob(token, float(row[token]), list(zip(*alternatives)))
        for token, row, alternatives in zip(tokens, logprobs, zip(ids, values))
    ]
