"""An engine, one call at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from generation.engine import Engine
from generation.sampling import Sampling


def prefill(engine: Engine, slot: int, ids: Sequence[int], **more) -> None:
    """Read a prompt at once."""
    engine.begin(slot, ids, **more)
    assert engine.read(slot)


def choose(engine: Engine, slots: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """A token for each of these slots."""
    (tokens,) = engine.write(slots, [uniforms])
    return tokens.tolist()


def logits(engine: Engine, slot: int = 0) -> Tensor:
    """The slot's logits (V,)."""
    return torch.tensor(engine.logits(slot))


def forced(engine: Engine, slot: int, tokens: Sequence[int]) -> Iterator[Tensor]:
    """The logits (V,) before each of these tokens, which are appended one at a time, and after the last."""
    for token in [*tokens, 0]:
        engine.set_sampling(slot, Sampling(0, logit_bias=((token, 100),)))
        assert choose(engine, [slot], [0.5]) == [token]
        yield logits(engine, slot)
