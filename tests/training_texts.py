"""Texts and a recipe small enough for tests."""

import copy
import dataclasses
import random

import torch

from shakespeare.model.gpt import GPT, causal_attention
from shakespeare.training.recipe import Recipe

SIZES = dict(block_size=16, steps=40, dropout=0.1, batch_chars=128, n_layer=1, n_head=2, n_embd=16)
TINY = Recipe(**SIZES, warmup=5, eval_every=10, covered=0.1, test_share=0.05)
ONE_STEP = Recipe(16, steps=1, dropout=0.0, batch_chars=64, n_layer=2, n_head=2, n_embd=32, average=0.8)


def sized(sizes: tuple[int, ...], recipe: Recipe = ONE_STEP) -> Recipe:
    """A recipe for a batch, block, V, C, heads, layers, and the window of an endless model."""
    batch, block, _, C, H, layers, *window = sizes
    endless = dict(positions="alibi", window=window[0]) if window else {}
    change = endless | dict(block_size=block, batch_chars=batch * block, n_embd=C, n_head=H, n_layer=layers)
    return dataclasses.replace(recipe, **change)


def exact(model: GPT, tokens: torch.Tensor) -> tuple[float, GPT]:
    """The loss of tokens (B, T + 1) in float64, by PyTorch, and a copy of the model with its gradients."""
    double = copy.deepcopy(model).double()
    for block in double.transformer.h:
        block.attn.attend = causal_attention
    logits = double(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), double


def words(length: int, alphabet: str = "abcdefgh", seed: int = 0) -> str:
    """Random words of a small dictionary: what a tiny model learns, and no passage of it twice."""
    chance = random.Random(seed)
    dictionary = ["".join(chance.choices(alphabet, k=chance.randint(2, 6))) for _ in range(50)]
    text = ""
    while len(text) < length:
        text += chance.choice(dictionary) + chance.choice((" ", " ", " ", "\n"))
    return text[:length]
