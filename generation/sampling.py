"""How a token is chosen from the logits: a text's settings, its uniform numbers, and the choice in PyTorch.

Sampling alone names a setting, its default, its bounds and its help, for the command line, the server, the
page and, in the order of its fields, for all kernels. The settings need neither NumPy nor torch.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from shakespeare.attention_ext.checks import real_number, whole_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

LARGEST_SEED = 2**63 - 1  # of commands and requests: OpenAI's API has whole numbers of 64 bits with a sign
SEEDS = 2**64  # of the generator
RANDOM = -1  # the seed that stands for a random one
MOST_BIAS = 100  # of a token's logit, up or down, as in OpenAI's API


@dataclass(frozen=True)
class Setting:
    """The values that a setting may have.

    help: a sentence for the command line. above: `minimum` itself is excluded. off: the value that changes
    nothing, the server's default; if it is None, so do numbers below 1. served: the server's bounds, if they
    are narrower. slider: minimum, maximum and step of the page's; a maximum of None is the vocabulary's size.
    """

    default: float
    help: str
    minimum: float = 0
    maximum: float = math.inf
    above: bool = False
    off: float | None = None
    served: tuple[float, float] | None = None
    slider: tuple[float, float | None, float] | None = None

    @property
    def integral(self) -> bool:
        """Whether it must be a whole number."""
        return isinstance(self.default, int)

    def checked(self, name: str, value: Any) -> float | None:
        """The value as an int or float; of None the default, unless None is `off`.

        Raises TypeError or ValueError naming the setting unless it may have this value.
        """
        if value is None:
            return None if self.off is None else self.default
        must = "a whole number" if self.integral else "a number"
        if self.off is None:
            must += " or None"
        value = (whole_number if self.integral else real_number)(name, value, must)
        enough = value > self.minimum if self.above else value >= self.minimum
        if not enough or not value <= min(self.maximum, sys.float_info.max):
            raise ValueError(f"{name} is {value}; it must be {self.bounds}")
        return None if self.off is None and value <= 0 else value

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        low = f"greater than {self.minimum}" if self.above else f"of at least {self.minimum}"
        if self.maximum == math.inf:
            return f"a number {low}"
        return f"{low} and at most {self.maximum}" if self.above else f"from {self.minimum} to {self.maximum}"


def setting(default: float, help: str, **more: Any) -> Any:
    """A field of Sampling that is a Setting. Its default is off, unless another value is."""
    return field(default=default, metadata={"setting": Setting(default, help, **{"off": default} | more)})


# The bounds of a share of the probability.
SHARE: dict[str, Any] = {"maximum": 1, "above": True, "slider": (0.05, 1, 0.05)}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, applied in this order.

    repetition_penalty: logits of tokens that have occurred are divided by this where they are positive and
    multiplied where they are negative (Keskar et al. 2019, arXiv:1909.05858); 1 changes nothing.
    frequency_penalty, presence_penalty: a written token loses its count times the first, and the second once,
    as in OpenAI's completions. The prompt does not count.
    logit_bias: (token id, number up to MOST_BIAS that is added to its logit); each id once.
    temperature: divides the logits; 0 takes the largest and ignores the filters.
    top_k: keep the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833); None, 0 and -1 keep all.
    typical_p: keep the tokens whose surprise, -log p, is nearest to the entropy, until their probabilities
    add up to this (Meister et al. 2022, arXiv:2202.00666; llama.cpp's 'typical'); 1 keeps all.
    top_p: keep the likeliest tokens until their probabilities, among those kept so far, add up to this
    (Holtzman et al. 2019, arXiv:1904.09751); 1 keeps all.
    min_p: keep the tokens with at least this share of the largest probability (Nguyen et al. 2024,
    arXiv:2407.01082); 0 keeps all.
    Tokens as likely as the last one kept are kept too. None stands for each default but that of top_k.
    Raises ValueError or TypeError naming the first setting that is out of range.
    """

    temperature: float = setting(
        0.8,
        "Divide the logits by this; 0 takes the likeliest token.",
        off=1.0,
        served=(0, 2),
        slider=(0, 2, 0.05),
    )
    top_k: int | None = setting(
        200,
        "Choose among the k likeliest tokens; 0 or -1: among all.",
        minimum=-1,
        maximum=2**63 - 1,
        off=None,
        slider=(1, None, 1),
    )
    top_p: float = setting(
        1.0, "Choose among the likeliest tokens that together have this probability.", **SHARE
    )
    min_p: float = setting(
        0.0, "Choose among tokens with at least this share of the highest probability.", maximum=1
    )
    typical_p: float = setting(
        1.0, "Choose among the tokens of typical surprise that together have this probability.", **SHARE
    )
    repetition_penalty: float = setting(
        1.0,
        "Above 1, tokens that have occurred become less likely.",
        above=True,
        # A penalty of 1e-37 makes a logit infinite, which would end the texts of others in the batch too.
        served=(0.01, 100),
    )
    presence_penalty: float = setting(
        0.0, "Subtract this from the logits of tokens that have been written.", minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtract this from a token's logit for each time that it has been written.",
        minimum=-2,
        maximum=2,
    )
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, known in SETTINGS.items():
            object.__setattr__(self, name, known.checked(name, getattr(self, name)))
        pairs = () if self.logit_bias is None else self.logit_bias
        if not isinstance(pairs, tuple) or not all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
            raise TypeError("logit_bias must be a tuple of pairs, each a token id and a number")
        checked = tuple(
            (whole_number("a token of logit_bias", t), real_number("a number of logit_bias", b))
            for t, b in pairs
        )
        for token, bias in checked:
            if token < 0:
                raise ValueError(f"logit_bias has token {token}; it must be at least 0")
            if not abs(bias) <= MOST_BIAS:
                bounds = f"from -{MOST_BIAS} to {MOST_BIAS}"
                raise ValueError(f"logit_bias has {bias} for token {token}; it must be {bounds}")
        if len(dict(checked)) < len(checked):
            raise ValueError("logit_bias has a token twice; it must have each once")
        object.__setattr__(self, "logit_bias", checked)

    @property
    def numbers(self) -> list[float]:
        """The settings that are numbers, as kernels take them."""
        return [getattr(self, name) or 0 for name in SETTINGS]

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits before the choice."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties) or bool(self.logit_bias)


def drawn_seed(seed: int) -> int:
    """The seed; for RANDOM a random one of the 32 bits that a generator uses."""
    return int.from_bytes(os.urandom(4)) if seed == RANDOM else seed


def generator() -> tuple[Any, Any]:
    """A generator, and what seeds it as PyTorch does."""
    import numpy as np

    raw = np.random.MT19937()
    return raw, np.random.RandomState(raw)


shared_generator = functools.cache(generator)
_sharing = threading.Lock()


class Uniforms:
    """The numbers in [0, 1) of a seed, torch.rand's in float64: each call gives the next ones, (count,).

    Seeding takes 3 us, a new generator 0.2 ms (Zen 3), so all texts share one for their first numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed & 0xFFFFFFFF  # the bits that PyTorch uses
        self._own: Any = None
        self._first = 0  # raw numbers of the first call

    def __call__(self, count: int) -> NDArray[np.float64]:
        if self._first and self._own is None:
            self._own, seeding = generator()
            seeding.seed(self._seed)
            self._own.random_raw(self._first, output=False)
        if self._own is not None:
            raw = self._own.random_raw(2 * count)
        else:
            with _sharing:
                shared, seeding = shared_generator()
                seeding.seed(self._seed)
                raw = shared.random_raw(2 * count)
            self._first = 2 * count
        halves = raw.view("int64")  # which becomes float twice as fast as uint64
        joined = (halves[::2] << 32 | halves[1::2]) & (2**53 - 1)  # the upper half comes first
        return joined * 2.0**-53


# The settings that are numbers, by their names.
SETTINGS: dict[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Sampling) if f.metadata}
# What a kernel takes for a setting that changes nothing.
OFF = {name: known.off or 0 for name, known in SETTINGS.items()}


def drawn(logits: Tensor, uniforms: Tensor, sampling: Sampling, counts: Tensor | None) -> Tensor:
    """A token id (B,) for each row of logits (B, V), by inverse transform sampling; on the tensors' device.

    uniforms: (B,), in [0, 1) and float64. counts: (B, 2, V), how often each id has occurred in each row, for
    the repetition penalty, and since the prompt, for the other two; None before any. Sums are float64 and in
    the order of the ids, so that engines with different rounding agree, such as the native one
    (generation/csrc/sampling.cpp). An id is -1 where logits hold NaN, or the largest is infinite, after
    penalties and bias.
    """
    import torch

    logits = logits.double()
    device = logits.device  # PyTorch's default device may be another
    penalty = sampling.repetition_penalty
    if counts is not None and penalty != 1:
        weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = logits.where(counts[:, 0] == 0, weaker)
    if counts is not None and (sampling.presence_penalty or sampling.frequency_penalty):
        written = counts[:, 1].double()
        logits = logits - (written * sampling.frequency_penalty + (written > 0) * sampling.presence_penalty)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias)
        added = torch.tensor(biases, dtype=torch.float64, device=device).expand(len(logits), -1)
        logits = logits.index_add(1, torch.tensor(ids, device=device), added)
    largest = logits.amax(-1, keepdim=True)
    good = largest[:, 0].abs() < math.inf
    if sampling.temperature == 0:
        return logits.argmax(-1).where(good, -1)
    weights = ((logits - largest) / sampling.temperature).exp()  # the likeliest token's weight is 1
    points = uniforms[:, None]
    limits = (sampling.top_p, sampling.typical_p, sampling.min_p)
    if limits == (1, 1, 0) and (sampling.top_k or logits.shape[1]) >= logits.shape[1]:
        return place_of(weights, points).where(good, -1)  # on a GPU each operation that is left out is time
    threshold = torch.zeros_like(largest)  # smaller weights are left out
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        threshold = weights.topk(sampling.top_k).values[:, -1:]
    if sampling.typical_p < 1:
        kept = (weights >= threshold) & (weights > 0)
        weights = weights.where(kept, 0.0)
        logs = weights.log().where(kept, 0.0)
        mean = (weights * logs).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
        distances = (logs - mean).abs().where(kept, math.inf)  # from the entropy
        nearest, order = distances.sort(-1)
        farthest = nearest.gather(-1, reached(weights.gather(-1, order), sampling.typical_p))
        weights = weights.where(distances <= farthest, 0.0)
    if sampling.top_p < 1:
        kept = weights.where(weights >= threshold, 0.0).sort(-1, descending=True).values
        threshold = kept.gather(-1, reached(kept, sampling.top_p))
    threshold = torch.maximum(threshold, sampling.min_p * weights.amax(-1, keepdim=True))
    return place_of(weights.where(weights >= threshold, 0.0), points).where(good, -1)


def place_of(weights: Tensor, points: Tensor) -> Tensor:
    """The place (B,) in weights (B, V) that each point (B, 1), a share of their sum, falls on."""
    import torch

    cumulative = weights.cumsum(-1)
    below = points * cumulative[:, -1:]  # below the last sum
    return torch.searchsorted(cumulative, below, right=True)[:, 0]


def reached(ordered: Tensor, share: float) -> Tensor:
    """The first place (B, 1) where the sum of weights (B, V), in this order, reaches a share of all."""
    sums = ordered.cumsum(-1)
    return (sums >= share * sums[:, -1:]).int().argmax(-1, keepdim=True)


def choose(
    logits: Tensor, uniforms: Tensor, samplings: Sequence[Sampling], counts: Tensor | None = None
) -> Tensor:
    """As drawn(), each row of logits (B, V) with its own sampling."""
    import torch

    if samplings and all(sampling == samplings[0] for sampling in samplings):
        return drawn(logits, uniforms, samplings[0], counts)
    rows = (slice(i, i + 1) for i in range(len(samplings)))
    found = [
        drawn(logits[row], uniforms[row], sampling, None if counts is None else counts[row])
        for row, sampling in zip(rows, samplings)
    ]
    return torch.cat([uniforms.new_empty(0, dtype=torch.int64), *found])
