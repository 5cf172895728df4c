"""What an own text must be, and how it is divided."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from training_texts import TINY, words

from shakespeare.model import corpus
from shakespeare.model.tokenizer import CharTokenizer
from shakespeare.training.material import divide, fit, repeated_share


def test_a_short_text_reduces_the_block_and_the_batch():
    recipe, notes = fit(words(2000), dataclasses.replace(TINY, block_size=128, batch_chars=2048))
    assert (recipe.block_size, recipe.batch_chars) == (48, 1800) and notes == [
        "the text has 2,000 characters; block_size is 48 instead of 128",
        "the text has 2,000 characters; batch_chars is 1800 instead of 2048",
    ]
    assert fit(words(6000), dataclasses.replace(TINY, block_size=128))[0].block_size == 128


def test_a_repetitive_text_is_reported():
    page = words(2000, "日本語文字")
    for text in ("The same line again and again.\n" * 1000, "a" * 5000, words(4000) * 2, page * 400):
        recipe, notes = fit(text, TINY)
        reported = "100% of the text's last tenth is also in the rest; the losses flatter the model"
        assert (recipe, notes) == (TINY, [reported]), text[:10]


def test_the_repeated_share_is_that_of_the_passages():
    training = words(3000)
    held_out = words(200, seed=1) + training[1000:1150] + words(100, "日本語文字", seed=2)
    assert repeated_share(training, held_out) == pytest.approx(119 / 419)


def test_a_long_text_takes_little_memory():
    text = words(50_000) * 20
    tracemalloc.start()
    fit(text, TINY)
    divide(text, TINY)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * len(text)  # and the text itself at most 4 bytes a character


def test_the_parts_are_the_text_in_order():
    text = words(2001)
    material = divide(text, TINY)
    whole = np.concatenate([material.training, material.validation, material.test])
    assert whole.tolist() == CharTokenizer.from_text(text).encode(text)
    assert [len(part) for part in (material.training, material.validation, material.test)] == [1800, 101, 100]
    shipped = divide(text, dataclasses.replace(TINY, test_share=0.0))
    assert len(shipped.test) == 0 and len(shipped.validation) == len(corpus.split(text)[1])
