"""GPT-2's vocabulary as its own files have it: bytes as printable characters, and merges."""

from __future__ import annotations

import math

from shakespeare.model.huggingface import BYTES
from shakespeare.model.tokenizer import GPT2Tokenizer

LETTERS = {byte: letter for letter, byte in BYTES.items()}


def shown(token: bytes) -> str:
    """A token's bytes as printable characters."""
    return "".join(LETTERS[byte] for byte in token)


def tables(tokenizer: GPT2Tokenizer) -> tuple[dict[str, int], dict[str, int], list[tuple[str, str]]]:
    """The ids of the tokens and of the special ones, and the pairs that are joined, the first ones first.

    A token's pair is what the tokens of a lower rank leave of its bytes.
    """
    ranks, special = tokenizer._encoding._mergeable_ranks, tokenizer._encoding._special_tokens
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, math.inf) for a, b in zip(parts, parts[1:])]
            at = joined.index(min(joined))
            if joined[at] >= rank:
                raise ValueError(f"token {rank} of the vocabulary is no pair of others")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((shown(parts[0]), shown(parts[1])))
    return {shown(token): rank for token, rank in ranks.items()}, special, merges
