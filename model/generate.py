"""Writing text: sample(), prefill(), decode() and generate(), small free functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.gpt import GPT
from model.kv_cache import KVCache


def sample(logits: Tensor, uniform: float, temperature: float = 1.0, top_k: int | None = None) -> int:
    """One token id from logits (V,), by the inverse of the cumulative distribution at `uniform`.

    uniform: in [0, 1). temperature: divides the logits; 0 takes the largest. top_k: keep the k largest
    logits, and those equal to the last of them, as nanoGPT does.
    In float64, tokens in the order of their ids, so that engines which differ by rounding agree.
    Raises ValueError if the logits hold NaN.
    """
    if logits.isnan().any():
        raise ValueError("logits hold NaN; they must be numbers")
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / temperature
    if top_k is not None and top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -math.inf)
    cumulative = torch.softmax(scaled, dim=-1).cumsum(-1)
    point = uniform * cumulative[-1:]
    return int(torch.searchsorted(cumulative, point, right=True).clamp_(max=len(scaled) - 1))


def prefill(model: GPT, ids: Sequence[int], caches: list[KVCache] | None = None) -> Tensor:
    """Logits (V,) of the token after `ids`, all of them read at once; fills the caches if given."""
    return model(torch.tensor([ids]), caches, last_only=True)[0, -1]


def decode(model: GPT, token: int, caches: list[KVCache]) -> Tensor:
    """Logits (V,) of the token after `token`, which continues what the caches hold."""
    return model(torch.tensor([[token]]), caches, last_only=True)[0, -1]


def generate(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 200,
    seed: int = 1337,
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield max_new_tokens token ids that continue `prompt`, each as soon as it is known.

    One uniform number per token decides it, from a generator seeded with `seed`: the same seed gives the
    same tokens whatever attention the model was given. Past the block size the model sees the last
    block_size tokens, at positions counted from the window's start, so that every token costs a whole
    window. use_cache=False recomputes everything for every token.
    Raises ValueError naming the argument that is out of range.
    """
    config = model.config
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it must have at least one token")
    if not all(0 <= token < config.vocab_size for token in prompt):
        raise ValueError(f"prompt has a token outside 0 .. {config.vocab_size - 1}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature}; it must be a number of at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    return _generate(model, list(prompt), max_new_tokens, temperature, top_k, seed, use_cache)


@torch.inference_mode()
def _generate(model, ids, max_new_tokens, temperature, top_k, seed, use_cache) -> Iterator[int]:
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    caches: list[KVCache] | None = None
    for _ in range(max_new_tokens):
        if not use_cache or len(ids) > config.block_size:
            logits = prefill(model, ids[-config.block_size :])
        elif caches is None:
            length = min(config.block_size, len(ids) + max_new_tokens)
            caches = [KVCache(1, config.n_head, length, config.head_dim) for _ in range(config.n_layer)]
            logits = prefill(model, ids, caches)
        else:
            logits = decode(model, ids[-1], caches)
        uniform = torch.rand((), dtype=torch.float64, generator=generator).item()
        ids.append(sample(logits, uniform, temperature, top_k))
        yield ids[-1]
