"""A model small enough for tests, with weights large enough that its choices are its own."""

from __future__ import annotations

import torch

from model.gpt import GPT, Attend, GPTConfig

CHARACTERS = list("\n abcdefghi")


def gpt(attend: Attend, **change) -> GPT:
    """A GPT of two layers with random weights, the same each time, in evaluation mode."""
    fields = dict(block_size=16, vocab_size=len(CHARACTERS), n_layer=2, n_head=2, n_embd=16) | change
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = GPT(GPTConfig(**fields), attend)
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()
