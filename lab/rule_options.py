"""Rules of attention for tests and measurements, by numbers and words that a command line can hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shakespeare.attention_ext import rules as ruling

NUMBERS = {"window": int, "softcap": float, "documents": int}
WORDS = ("alibi", "sinks", "bias")
HOW = "window=KEYS, softcap=BOUND, documents=KEYS, alibi, sinks, bias or some of them joined by +"


def parse(text: str | None) -> dict[str, Any]:
    """The arguments of example() in 'window=255+alibi'; {} in 'none'. Raises ValueError for another text."""
    found: dict[str, Any] = {}
    for rule in () if text in (None, "none") else text.split("+"):
        name, _, number = rule.partition("=")
        try:
            value = NUMBERS[name](number) if name in NUMBERS else name in WORDS and not number
            if not value or value < 0 or name in found:
                raise ValueError
        except ValueError:
            raise ValueError(f"rule is {text!r}; it must be none, {HOW}") from None
        found[name] = value
    return found


def example(
    H: int,
    N: int,
    device: Any = "cpu",
    window: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
    documents: int | None = None,
    bias: bool = False,
) -> dict[str, Any]:
    """The options of attention() for a batch of N queries and keys; those that are not given are left out.

    window: keys to each side. alibi: slopes of Press et al. 2021 (arXiv:2108.12409), 2^(-8 h / H) for head h
    from 1 on. sinks: a logit of 0 for each head. documents: keys of each, one after the other. bias: normal
    numbers, the same for each head.
    """
    found: dict[str, Any] = {
        "window": window and (window, window),
        "softcap": softcap,
        "alibi_slopes": 2.0 ** (-8 / H * torch.arange(1.0, H + 1)) if alibi else None,
        "sinks": torch.zeros(H) if sinks else None,
        "documents": documents and (torch.arange(N) // documents)[None],
        "bias": torch.randn(1, 1, N, N, generator=torch.Generator().manual_seed(0)) if bias else None,
    }
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
        if value is not None
    }


def seen(
    N: int, causal: bool, window: int | None = None, documents: int | None = None, **_: Any
) -> list[range]:
    """The keys that each of N queries sees, of N."""
    i = torch.arange(N)
    begin = torch.zeros(N, dtype=torch.int64)
    end = torch.full((N,), N)
    if window is not None:
        begin = i - window
        end = i + window + 1
    if documents is not None:
        first = i // documents * documents
        begin = torch.maximum(begin, first)
        end = torch.minimum(end, first + documents)
    end = torch.minimum(end, i + 1) if causal else end
    return list(map(range, begin.clamp(min=0).tolist(), end.clamp(max=N).tolist()))


def together(keys: list[range], rows: int) -> list[range]:
    """The keys that any query of a tile sees, for tiles of so many queries."""
    return [
        range(min(k.start for k in keys[i : i + rows]), max(k.stop for k in keys[i : i + rows]))
        for i in range(0, len(keys), rows)
    ]


def exact(tensors: Sequence[torch.Tensor], text: str, causal: bool) -> tuple[torch.Tensor, ...]:
    """What q, k and v (B, H, N, d) give in float64, a head at a time.

    It is the output; of four tensors, the last of them dout, the gradients of q, k and v.
    """
    from shakespeare.attention_ext import reference

    q = tensors[0]
    H, N = q.shape[1:3]
    gradient = len(tensors) > 3
    found = tuple(
        torch.empty(t.shape, dtype=torch.float64, device=q.device) for t in tensors[: 1 + 2 * gradient]
    )
    for b, h in itertools.product(range(q.shape[0]), range(H)):
        options = example(H, N, q.device, **parse(text))
        for name in {"alibi_slopes", "sinks"} & set(options):
            options[name] = options[name][h : h + 1]
        head = [t[b : b + 1, h : h + 1].double() for t in tensors]
        leaves = [t.requires_grad_(gradient) for t in head[:3]]
        rules = ruling.checked(options, leaves[0], N)
        out: Any = reference.attention(*leaves, causal=causal, scale=q.shape[3] ** -0.5, rules=rules)
        results = torch.autograd.grad(out, leaves, head[3]) if gradient else (out,)
        for whole, result in zip(found, results):
            whole[b, h] = result[0, 0]
    return found
