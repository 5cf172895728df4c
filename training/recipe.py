"""What decides a training run: the recipe, and those of the shipped checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run, except the corpus and the device.

    block_size in characters; batch_chars is batch size times block size.
    average: decay of the exponential moving average of the weights, per step.
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


RECIPES = {
    "shakes128": Recipe(block_size=128, steps=60_000, dropout=0.12, muon_lr=0.04),
    "shakes256": Recipe(block_size=256, steps=60_000, dropout=0.08, muon_lr=0.04),
    "shakes1024": Recipe(block_size=1024, steps=40_000, dropout=0.08, muon_lr=0.02),
    "shakes2048": Recipe(block_size=2048, steps=20_000, dropout=0.06, muon_lr=0.04),
}


def learning_rate(recipe: Recipe, step: int) -> float:
    """Fraction of the peak learning rate: linear warm-up, then a cosine to 0."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))
