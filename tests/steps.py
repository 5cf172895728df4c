"""An engine, one call at a time, and settings that a GPU applies as the CPU does."""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.request import Request, Text
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Writer

MIXED = dict(top_k=20, top_p=0.9, typical_p=0.9, min_p=0.02, temperature=1.2)
SAMPLINGS = [
    *(dict(temperature=0), dict(top_k=5), dict(top_p=0.8), dict(min_p=0.1), dict(typical_p=0.7), MIXED),
    *(dict(repetition_penalty=1.3), dict(presence_penalty=0.7, frequency_penalty=0.3)),
    *(dict(logit_bias=((1, 3.0), (20, -50.0))), dict(temperature=1e-300)),
]


def counts_of(prompt: Sequence[int], written: Sequence[int], vocab_size: int) -> Tensor:
    """How often each token has occurred in a text, and since the prompt, (1, 2, V)."""
    texts = ([*prompt, *written], written)
    return torch.stack([torch.tensor(ids, dtype=int).bincount(minlength=vocab_size) for ids in texts])[None]


def write(writer: Writer, *requests: Request) -> dict[Text, list[int]]:
    """The texts of requests that join together, and the tokens that steps of any length give them."""
    texts: dict[Text, list[int]] = {writer.join(request): [] for request in requests}
    lengths = itertools.cycle(range(1, 33))
    while step := writer.step(most := next(lengths)):
        for text, tokens in step:
            assert 1 <= len(tokens) <= most
            texts[text] += tokens.tolist()
    for text in texts:
        writer.leave(text)
    return texts


def write_at_random(engine: Engine, requests: Sequence[Request], seed: int, **settings: float) -> list[tuple]:
    """The tokens and log-probabilities of requests, which join and leave at random. settings: Writer's."""
    rng, writer = random.Random(seed), Writer(engine, **settings)
    waiting, done = list(enumerate(requests)), {}
    growing: dict[Text, tuple[int, list[int]]] = {}
    while waiting or growing:
        while waiting and writer.free and (not growing or rng.random() < 0.4):
            number, request = waiting.pop(0)
            growing[writer.join(request)] = number, []
        for text, tokens in writer.step(rng.choice([1, 2, 5, 64])):
            growing[text][1].extend(tokens.tolist())
        for text in [text for text in growing if not (text.remaining or text.lacks_prompt_logprobs)]:
            number, tokens = growing.pop(text)
            done[number] = tokens, text.logprobs, text.prompt_logprobs
            writer.leave(text)
    return [done[number] for number in range(len(requests))]


def prefill(engine: Engine, slot: int, ids: Sequence[int], **more) -> None:
    engine.begin(slot, ids, **more)
    assert engine.read(slot)


def choose(engine: Engine, slots: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    (tokens,) = engine.write(slots, [uniforms])
    return tokens.tolist()


def logits(engine: Engine, slot: int = 0) -> Tensor:
    return torch.tensor(engine.logits(slot))


def forced(engine: Engine, slot: int, tokens: Sequence[int]) -> Iterator[Tensor]:
    """The logits (V,) before each of these tokens, which are appended one at a time, and after the last."""
    for token in [*tokens, 0]:
        engine.set_sampling(slot, Sampling(0, logit_bias=((token, 100),)))
        assert choose(engine, [slot], [0.5]) == [token]
        yield logits(engine, slot)
