"""How the next token is chosen from the logits: the usual filters, then one uniform number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice, applied in this order.

    repetition_penalty: logits of tokens that have occurred are divided by this where they are positive and
    multiplied where they are negative (Keskar et al. 2019, arXiv:1909.05858); 1 changes nothing.
    temperature: divides the logits; 0 takes the largest, whatever follows.
    top_k: keep the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833); None keeps all.
    top_p: keep the likeliest tokens until their probabilities, among those kept so far, add up to this
    (Holtzman et al. 2019, arXiv:1904.09751); 1 keeps all.
    min_p: keep the tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024,
    arXiv:2407.01082); 0 keeps all.
    Tokens as likely as the last one that is kept are kept too.
    Raises ValueError or TypeError naming the first setting that is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, must: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {must}")

        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be a number")
        if self.top_k is not None and (not isinstance(self.top_k, int) or isinstance(self.top_k, bool)):
            raise TypeError(f"top_k is a {type(self.top_k).__name__}; it must be a whole number or None")
        check("temperature", 0 <= self.temperature < math.inf, "a number of at least 0")
        check("top_k", self.top_k is None or 1 <= self.top_k < 2**63, "at least 1 and fit 63 bits")
        check("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1")
        check("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number greater than 0")


def sample(logits: Tensor, uniform: float, sampling: Sampling = Sampling(), seen: Iterable[int] = ()) -> int:
    """One token id from logits (V,), by the inverse of the cumulative distribution at `uniform`.

    uniform: in [0, 1). seen: the ids that have occurred, for the repetition penalty.
    In float64, tokens in the order of their ids, so that engines which differ by rounding agree; the native
    engine's sample() in attention_ext/csrc/decoder.cpp does the same.
    Raises ValueError if the logits hold NaN, or the largest is infinite, after the penalty too.
    """
    logits = logits.double()
    if sampling.repetition_penalty != 1:
        at = torch.tensor(sorted(set(seen)), dtype=torch.long)
        penalised = logits[at]
        penalty = sampling.repetition_penalty
        logits[at] = torch.where(penalised > 0, penalised / penalty, penalised * penalty)
    if logits.isnan().any() or logits.max().isinf():
        raise ValueError("logits hold NaN, or the largest is infinite; they must be numbers")
    if sampling.temperature == 0:
        return int(logits.argmax())
    weights = ((logits - logits.max()) / sampling.temperature).exp()  # the likeliest token's is 1
    least = torch.zeros((), dtype=torch.float64)
    if sampling.top_k is not None and sampling.top_k < len(weights):
        least = weights.topk(sampling.top_k).values[-1]
    if sampling.top_p < 1:
        kept = weights[weights >= least].sort(descending=True).values
        enough = kept.cumsum(-1) >= sampling.top_p * kept.sum()
        least = kept[enough.nonzero()[0, 0] if enough.any() else -1]
    least = least.clamp(min=sampling.min_p)
    cumulative = weights.where(weights >= least, 0.0).cumsum(-1)
    chosen = torch.searchsorted(cumulative, uniform * cumulative[-1:], right=True)
    return int(chosen.clamp_(max=int(weights.nonzero()[-1])))
