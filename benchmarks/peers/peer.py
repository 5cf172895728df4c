"""The interface of every other engine, and the weights that they take."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.gpt import GPT

Weights = dict[str, Tensor]


class Peer(Protocol):
    """An engine that holds a model's weights; the first call with a batch size may allocate its buffers.

    Prompts have at least one token, and prompt and count together at most block_size + 1: the last
    token is returned but not read.
    """

    @property
    def name(self) -> str:
        """The engine and its version."""

    def logits(self, ids: list[int]) -> Tensor:
        """Logits (V,) of the token after `ids`."""

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` likeliest tokens that follow `prompt`, each given those before it."""

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The same for several prompts of equal length at once."""

    def prefill(self, ids: list[int]) -> None:
        """Read `ids` at once and find the first token that follows."""


class RoundedPeer(Peer, Protocol):
    """A peer with rounded weights, whose loss is measured too."""

    def every_logits(self, ids: list[int]) -> Tensor:
        """Logits (T, V) of the token after each of `ids` (T,), given those before."""


def named_weights(model: GPT) -> Weights:
    """The state dict without nanoGPT's prefix: wte.weight, h.0.attn.c_attn.weight (out, in) and so on."""
    return {
        name.removeprefix("transformer."): tensor.detach().float().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to wte.weight
    }


def bias_or_zeros(weights: Weights, layer: str) -> Tensor:
    """A layer's bias, for the engines that must have one."""
    return weights.get(f"{layer}.bias", torch.zeros(len(weights[f"{layer}.weight"])))
