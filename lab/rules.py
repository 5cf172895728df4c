"""Rules of attention for tests and measurements, by numbers that a command line can hold."""

from __future__ import annotations

from typing import Any

import torch


def example(
    B: int,
    H: int,
    N: int,
    window: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
    documents: int | None = None,
) -> dict[str, Any]:
    """The options of attention() for N queries and keys; those of rules that are not given are left out.

    window: keys to each side. alibi: slopes of Press et al. 2021 (arXiv:2108.12409), 2^(-8 h / H) for head h
    from 1 on. sinks: a logit of 0 for each head. documents: keys of each, one after the other.
    """
    found: dict[str, Any] = {"window": window and (window, window), "softcap": softcap}
    found["alibi_slopes"] = 2.0 ** (-8 / H * torch.arange(1.0, H + 1)) if alibi else None
    found["sinks"] = torch.zeros(H) if sinks else None
    found["documents"] = documents and (torch.arange(N) // documents).expand(B, N)
    return {name: value for name, value in found.items() if value is not None}
