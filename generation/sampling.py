"""Choose the next token from the logits: the usual filters, then a draw by one uniform number."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The settings of Sampling that are numbers and never None.
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, applied in this order.

    repetition_penalty: logits of tokens that have occurred are divided by this where they are positive and
    multiplied where they are negative (Keskar et al. 2019, arXiv:1909.05858); 1 changes nothing.
    frequency_penalty, presence_penalty: from -2 to 2. A written token loses its count times the first, and
    the second once, as in OpenAI's completions. The prompt does not count.
    logit_bias: (token id, number from -100 to 100 that is added to its logit); each id once.
    temperature: divides the logits; 0 takes the largest and ignores the filters.
    top_k: keep the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833); None keeps all.
    top_p: keep the likeliest tokens until their probabilities, among those kept so far, add up to this
    (Holtzman et al. 2019, arXiv:1904.09751); 1 keeps all.
    min_p: keep the tokens with at least this share of the largest probability (Nguyen et al. 2024,
    arXiv:2407.01082); 0 keeps all.
    Tokens as likely as the last one kept are kept too.
    Raises ValueError or TypeError naming the first setting that is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, must: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {must}")

        for name in NUMBERS:
            value = getattr(self, name)
            if not is_number(value):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be a number")
        if self.top_k is not None and (not isinstance(self.top_k, int) or isinstance(self.top_k, bool)):
            raise TypeError(f"top_k is a {type(self.top_k).__name__}; it must be a whole number or None")
        check("temperature", 0 <= self.temperature < math.inf, "a number of at least 0")
        check("top_k", self.top_k is None or 1 <= self.top_k < 2**63, "at least 1 and fit 63 bits")
        check("top_p", 0 < self.top_p <= 1, "greater than 0 and at most 1")
        check("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number greater than 0")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        pairs = self.logit_bias
        if not isinstance(pairs, tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
            raise TypeError("logit_bias must be a tuple of pairs, each a token id and a number")
        for token, bias in pairs:
            if not isinstance(token, int) or isinstance(token, bool) or not is_number(bias):
                raise TypeError(f"logit_bias has ({token!r}, {bias!r}); it must be a token id and a number")
            if token < 0:
                raise ValueError(f"logit_bias has token {token}; it must be at least 0")
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias has {bias} for token {token}; it must be from -100 to 100")
        if len({token for token, _ in pairs}) < len(pairs):
            raise ValueError("logit_bias has a token twice; it must have each once")


def is_number(value: object) -> bool:
    """Whether a value is an int or a float. A bool does not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def sample(
    logits: Tensor,
    uniforms: Sequence[float],
    sampling: Sampling = Sampling(),
    seen: Sequence[Collection[int]] | None = None,
    written: Sequence[Mapping[int, int]] | None = None,
) -> list[int]:
    """A token id for each row of logits (B, V), by inverse transform sampling.

    uniforms: a number in [0, 1) for each row. seen: the ids that have occurred in each row, for the
    repetition penalty. written: how often each id was written in each row, for the other two.
    Sums are float64 and in the order of the ids, so that engines with different rounding agree. The native
    engine's sample() in generation/csrc/sampling.cpp does the same.
    Raises ValueError if the logits hold NaN or the largest is infinite after penalties and bias.
    """
    logits = logits.double()
    if sampling.repetition_penalty != 1:
        occurred = torch.zeros(logits.shape, dtype=torch.bool)
        for row, ids in zip(occurred, seen or ()):
            row[list(ids)] = True
        penalty = sampling.repetition_penalty
        logits = logits.where(~occurred, torch.where(logits > 0, logits / penalty, logits * penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        losses = torch.zeros(logits.shape, dtype=torch.float64)
        for row, counts in zip(losses, written or ()):
            for token, count in counts.items():
                row[token] = count * sampling.frequency_penalty + sampling.presence_penalty
        logits = logits - losses
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias)
        logits = logits.index_add(
            1, torch.tensor(ids), torch.tensor(biases, dtype=torch.float64).expand(len(logits), -1)
        )
    largest = logits.amax(-1, keepdim=True)
    if not largest.isfinite().all():
        raise ValueError("logits hold NaN, or the largest is infinite; they must be numbers")
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    weights = ((logits - largest) / sampling.temperature).exp()  # the likeliest token's weight is 1
    least = torch.zeros(len(logits), 1, dtype=torch.float64)  # smaller weights are left out
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        least = weights.topk(sampling.top_k).values[:, -1:]
    if sampling.top_p < 1:
        kept = weights.where(weights >= least, 0.0).sort(-1, descending=True).values
        sums = kept.cumsum(-1)
        enough = sums >= sampling.top_p * sums[:, -1:]
        least = kept.gather(-1, enough.int().argmax(-1, keepdim=True))  # where the sum first reaches top_p
    least = least.clamp(min=sampling.min_p)
    cumulative = weights.where(weights >= least, 0.0).cumsum(-1)
    points = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative[:, -1:]  # below the last sum
    return torch.searchsorted(cumulative, points, right=True)[:, 0].tolist()


def choose(
    logits: Tensor,
    uniforms: Sequence[float],
    samplings: Sequence[Sampling],
    seen: Sequence[Collection[int]],
    written: Sequence[Mapping[int, int]],
) -> list[int]:
    """A token id for each row of logits (B, V), each with its own sampling; see sample() for the rest."""
    if samplings and all(sampling == samplings[0] for sampling in samplings):
        return sample(logits, uniforms, samplings[0], seen, written)
    return [
        sample(row[None], [uniform], sampling, [occurred], [counts])[0]
        for row, uniform, sampling, occurred, counts in zip(logits, uniforms, samplings, seen, written)
    ]
