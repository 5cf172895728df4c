"""Texts and a recipe small enough for tests."""

import random

from shakespeare.training.recipe import Recipe

SIZES = dict(block_size=16, steps=40, dropout=0.1, batch_chars=128, n_layer=1, n_head=2, n_embd=16)
TINY = Recipe(**SIZES, warmup=5, eval_every=10, covered=0.1, test_share=0.05)


def words(length: int, alphabet: str = "abcdefgh", seed: int = 0) -> str:
    """Random words of a small dictionary: what a tiny model learns, and no passage of it twice."""
    chance = random.Random(seed)
    dictionary = ["".join(chance.choices(alphabet, k=chance.randint(2, 6))) for _ in range(50)]
    text = ""
    while len(text) < length:
        text += chance.choice(dictionary) + chance.choice((" ", " ", " ", "\n"))
    return text[:length]
