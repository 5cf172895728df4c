"""The text of a run: checked, divided and encoded."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.model import corpus
from shakespeare.model.tokenizer import CharTokenizer
from shakespeare.training.recipe import MOST_EVALUATED, MOST_WATCHED, SHORTEST, Recipe

# The search for repetitions takes PASSAGES passages of WINDOW characters.
WINDOW = 32
PASSAGES = 500
FLATTERED = 0.3  # share of repeated passages that gives a note
FACTOR = 0x9E3779B97F4A7C15  # of a hash: odd, with bits everywhere
MOST_OLD = 32_768  # characters of the old text that are evaluated, before and after


@dataclass(frozen=True)
class Material:
    """The parts of a text, and what their tokens mean.

    training: (N,), of the type that CharTokenizer.encode_array() gives. validation, test: int64, as windows()
    gives them; test is empty without a test_share. watched: what of the validation text is evaluated during
    the run.
    """

    tokenizer: CharTokenizer
    training: NDArray[Any]
    validation: NDArray[Any]
    watched: NDArray[Any]
    test: NDArray[Any]


def fit(text: str, recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with a block and a batch that suit an own text, and notes for the user.

    Raises ValueError if the text is too short.
    """
    if len(text) < SHORTEST:
        raise ValueError(f"text has {len(text):,} characters; it must have at least {SHORTEST:,}")
    training, held_out = corpus.split(text)
    share = repeated_share(training, held_out)
    notes = []
    if share > FLATTERED:
        notes = [f"{share:.0%} of the text's last tenth is also in the rest; the losses flatter the model"]
    bounds = {
        "block_size": len(held_out) // 4 // 8 * 8,  # two windows in each half of the last tenth
        "batch_chars": len(training),
    }
    for name, limit in bounds.items():
        wanted = getattr(recipe, name)
        if wanted > limit:
            notes.append(f"the text has {len(text):,} characters; {name} is {limit} instead of {wanted}")
            changed: dict[str, Any] = {name: limit}
            recipe = dataclasses.replace(recipe, **changed)
    return recipe, notes


def repeated_share(training: str, held_out: str) -> float:
    """The share of some PASSAGES passages of WINDOW characters of `held_out` that are also in `training`."""
    last = len(held_out) - WINDOW
    starts = range(0, last + 1, max(1, last // PASSAGES))
    if not starts:
        return 0.0
    joined = "".join(held_out[start : start + WINDOW] for start in starts)
    wanted = np.unique(_hashes(np.concatenate(list(corpus.pieces(joined))))[::WINDOW])
    beginnings = np.zeros(2**16, bool)  # the first bits of wanted hashes; few others have to be compared
    beginnings[wanted >> 48] = True
    found: set[int] = set()
    for points in corpus.pieces(training, WINDOW - 1):
        hashes = _hashes(points)
        found.update(hashes[beginnings[hashes >> 48]].tolist())
    return len(found.intersection(wanted.tolist())) / len(wanted)


def _hashes(points: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The hash of each passage of WINDOW code points: a polynomial modulo 2**64, by doubling its length."""
    hashes = points.astype(np.uint64)
    factor = FACTOR
    length = 1
    while length < WINDOW:
        hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
        factor = factor**2 % 2**64
        length *= 2
    return hashes


def divide(text: str, recipe: Recipe, tokenizer: CharTokenizer | None = None) -> Material:
    """The text's parts. tokenizer: must know all characters; by default it is made from the text.

    Raises ValueError if the part for training is not longer than a block.
    """
    tokenizer = tokenizer or CharTokenizer.from_text(text)
    training, held_out = corpus.split(tokenizer.encode_array(text), recipe.held_out)
    if len(training) <= recipe.block_size:
        has = f"text has {len(training)} characters for training"
        raise ValueError(f"{has}; it must have more than block_size={recipe.block_size}")
    end = len(held_out) - int(recipe.test_share * len(text))
    size = recipe.block_size
    validation = held_out[:end].astype(np.int64)
    test = held_out[end:].astype(np.int64)
    if not recipe.test_share:
        return Material(tokenizer, training, validation, validation, test)
    watched = windows(validation, size, MOST_WATCHED)
    validation = windows(validation, size, MOST_EVALUATED)
    return Material(tokenizer, training, validation, watched, windows(test, size, MOST_EVALUATED))


def windows(ids: NDArray[Any], block_size: int, limit: int) -> NDArray[Any]:
    """ids (N,) if they are at most `limit`, else evenly spaced windows (n, block_size + 1) of them.

    Neighbouring windows share a token, because the last one of a window is only predicted.
    """
    if len(ids) <= limit:
        return ids
    block_size = min(block_size, len(ids) - 1)
    every = np.lib.stride_tricks.sliding_window_view(ids, block_size + 1)[::block_size]
    count = max(1, min(len(every), limit // block_size))
    return every[(np.linspace(0, len(every) - 1, count) + 0.5).astype(int)]  # halves upwards, as the page
