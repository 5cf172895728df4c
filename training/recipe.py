"""Recipes, which decide a training run: those of the shipped checkpoints, and those of an own text."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from shakespeare.attention_ext.checks import finite, set_defaults, whole_number
from shakespeare.attention_ext.parts import one_of
from shakespeare.model.config import GPTConfig

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT

# Share of the peak learning rate after the warm-up, by the progress in [0, 1]; each ends at 0.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
}
CLIP = 1.0  # the largest norm of all gradients
BETAS = (0.9, 0.99)  # of AdamW
EPSILON = 1e-8
MOMENTUM = 0.95  # of Muon
ITERATIONS = 5  # of Newton-Schulz
QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients, with a steep slope at 0
LEAST_NORM = 1e-7  # added to a matrix's norm
SIZES = ("block_size", "n_layer", "n_head", "n_embd", "positions", "window")  # of the model
GOLDEN = (math.sqrt(5) - 1) / 2  # of the text from a window to the next
SHORTEST = 2000  # characters of an own text: its validation part has a hundred
MOST_EVALUATED = 100_000  # characters of each held-out part; they give the loss to about 0.005 nats
MOST_WATCHED = 16_384  # characters of the validation part that are evaluated during the run
EVALUATIONS = 40  # most evaluations of a run by time; a long one has more
LONGEST_WAIT = 60.0  # seconds between two evaluations, unless they take long
EVALUATING = 0.03  # share of the time that evaluations may take
MARGIN = 1.2  # factor on the estimated time of a run's end


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run, except the corpus and the device.

    block_size in characters; batch_chars is batch size times block size. average: largest decay of the
    exponential moving average of the weights, per training step; covered: it covers at most this share of the
    training steps done; 0 sets no limit. warmup: training steps of the linear warm-up. decay: one of DECAYS.
    minutes: the length of the run, which replaces steps and eval_every; None takes `steps`. held_out: share
    of the text, at its end, that is not learned; with 0 the last weights are kept. test_share: the part of
    it, at its end, that nothing selects on. The rest is the validation text.
    positions, window: as in GPTConfig.
    Raises TypeError or ValueError naming a number that is of another type, negative, infinite or NaN.
    """

    block_size: int
    steps: int
    dropout: float
    batch_chars: int = 16_384
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    position_lr: float = 3e-4
    weight_decay: float = 0.1
    average: float = 0.999
    warmup: int = 200
    eval_every: int = 500
    seed: int = 1337
    decay: str = "cosine"
    minutes: float | None = None
    covered: float = 0.0
    held_out: float = 0.1
    test_share: float = 0.0
    positions: str = "table"
    window: int | None = None

    def __post_init__(self) -> None:
        set_defaults(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is str or value is None and each.default is None:
                continue
            number = (finite if "float" in str(each.type) else whole_number)(each.name, value)
            if number < 0:
                raise ValueError(f"{each.name} is {number}; it must be at least 0")
            object.__setattr__(self, each.name, number)
        one_of("decay", self.decay, DECAYS)

    @property
    def batch(self) -> int:
        """Sequences of a training step."""
        return max(1, self.batch_chars // self.block_size)

    def config(self, vocab_size: int, start: "GPT | None" = None) -> GPTConfig:
        """The model's, with the recipe's sizes; the rest is as in `start`, or for None without biases."""
        fixed = GPTConfig(bias=False) if start is None else start.config
        sizes: dict[str, Any] = {name: getattr(self, name) for name in (*SIZES, "dropout")}
        return replace(fixed, vocab_size=vocab_size, **sizes)

    def average_decay(self, done: int) -> float:
        """The decay of the average in the training step after `done` ones."""
        return min(self.average, 1 - 1 / max(1.0, self.covered * done)) if self.covered else self.average

    def optimizer(self) -> dict[str, float | tuple[float, ...]]:
        """Settings of training/csrc/training_step.h, in its order."""
        return {
            "clip": CLIP,
            "muon_rate": self.muon_lr,
            "adam_rate": self.adam_lr,
            "position_rate": self.position_lr,
            "weight_decay": self.weight_decay,
            "momentum": MOMENTUM,
            "betas": BETAS,
            "epsilon": EPSILON,
            "quintic": QUINTIC,
            "least_norm": LEAST_NORM,
        }


RECIPES = {
    "shakes128": Recipe(block_size=128, steps=60_000, dropout=0.12, muon_lr=0.04),
    "shakes256": Recipe(block_size=256, steps=60_000, dropout=0.08, muon_lr=0.04),
    "shakes1024": Recipe(block_size=1024, steps=40_000, dropout=0.08, muon_lr=0.02),
    "shakes2048": Recipe(block_size=2048, steps=20_000, dropout=0.06, muon_lr=0.04),
    "shakes-endless": Recipe(
        block_size=1024,
        steps=8_000,
        dropout=0.12,
        muon_lr=0.04,
        eval_every=1500,
        positions="alibi",
        window=256,
    ),
}
# A CPU learns more in a minute from many steps with small batches. In few passes dropout gains nothing.
OWN_TEXT = Recipe(
    block_size=128,
    steps=0,
    dropout=0.0,
    batch_chars=2048,
    adam_lr=6e-3,
    position_lr=3e-3,
    weight_decay=0.12,
    warmup=50,
    decay="linear",
    minutes=3.0,
    covered=0.04,
    test_share=0.05,
)
