"""Fine-tuning: fit the model that a run starts from to a text and a block size."""

import dataclasses
from typing import Any

import torch

from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.config import EMBEDDING, HEAD, PLACES
from shakespeare.model.corpus import alphabet
from shakespeare.model.gpt import GPT
from shakespeare.model.tokenizer import CharTokenizer
from shakespeare.training.recipe import SIZES, Recipe

# Fine-tuning takes half the rates: lower loss on other prose than with full or quarter rates (shakes256).
RATES = ("muon_lr", "adam_lr", "position_lr")
SHARE = 0.5
NOISE = 0.1  # noise of a new character's embedding, as a share of the others' spread


def recipe_of(recipe: Recipe, model: GPT, block_size: int | None) -> Recipe:
    """The recipe with the model's sizes and lower learning rates. block_size: a smaller one, or None.

    Raises ValueError if it is larger than the model's, which has no position embeddings beyond its own.
    """
    c = model.config
    if block_size is not None and block_size > c.block_size and not c.endless:
        raise ValueError(f"block_size is {block_size}; it must be at most {c.block_size}, that of the model")
    changed: dict[str, Any] = {name: getattr(c, name) for name in SIZES}
    changed["block_size"] = block_size or c.block_size
    rates = {name: SHARE * getattr(recipe, name) for name in RATES}
    return dataclasses.replace(recipe, **changed, **rates)


def fitted(checkpoint: Checkpoint, text: str, block_size: int, seed: int) -> tuple[GPT, CharTokenizer, str]:
    """The model with the text's new characters and this block size, its vocabulary, and the new characters.

    A new character's row of the embedding and of the head is the mean of the others plus noise.
    """
    known = checkpoint.tokenizer
    assert isinstance(known, CharTokenizer)  # load() refuses others
    new = "".join(sorted(set(alphabet(text)) - set(known.characters)))
    tokenizer = CharTokenizer([*known.characters, *new])
    config = dataclasses.replace(checkpoint.config, block_size=block_size, vocab_size=len(tokenizer))
    weights = dict(checkpoint.model.state_dict())
    noise = torch.randn(len(new), config.n_embd, generator=torch.Generator().manual_seed(seed))
    for name in (EMBEDDING, HEAD):  # (V, C)
        old = weights[name]
        weights[name] = torch.cat([old, old.mean(0) + NOISE * old.std(0, unbiased=False) * noise])
    if not config.endless:
        weights[PLACES] = weights[PLACES][:block_size]
    with torch.random.fork_rng(devices=[]):
        model = GPT(config, checkpoint.model.attend)
    model.load_state_dict(weights)
    return model.eval(), tokenizer, new
