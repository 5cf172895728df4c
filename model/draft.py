"""draft.safetensors beside a model: probabilities of the next token by the last few, for guesses at writing.

generation/csrc/ngrams.h describes the tables. They hold no text: only contexts of at most five tokens that
the text repeats, by their hashes. The file is not trusted; the decoder checks its tables when it takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from shakespeare.model.files import write_file
from shakespeare.model.tokenizer import CharTokenizer, Tokenizer

FILE = "draft.safetensors"
ORDER = 5  # the most tokens of a context, Tail::MOST of generation/csrc/draft.h
HEAD, PAIR = 3, 2  # bytes of a record, and of each token in it
FACTOR = np.uint64(0x9E3779B97F4A7C15)
MOST_BYTES = 300_000  # of a file
MOST_BITS = 24  # of the number of buckets
MOST_VOCABULARY = 256  # a token takes a byte
TENSORS = {"vocabulary": "U32", "first": "U8", "starts": "U32", "records": "U8"}


def first_hashes(count: int) -> NDArray[np.uint64]:
    """The hashes of so many contexts without tokens."""
    return np.full(count, FACTOR, np.uint64)


def extended(hashes: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The hashes of contexts with one more token in front, as generation/csrc/ngrams.cpp computes them."""
    mixed = (hashes ^ (tokens + 1).astype(np.uint64)) * FACTOR
    return mixed ^ mixed >> np.uint64(29)


def share(code: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The probabilities that codes stand for."""
    return np.square(code / np.float32(255), dtype=np.float32)


class Records(NamedTuple):
    """The contexts of a draft: the first one of each bucket, then the second ones, and so on.

    bits: of a bucket's number. bucket, tag, factor (contexts): as in NgramTables. first, pairs (contexts):
    where its pairs begin, and how many it has. tokens, codes (of all pairs).
    """

    bits: int
    bucket: NDArray[np.int64]
    tag: NDArray[np.int64]
    factor: NDArray[np.int64]
    first: NDArray[np.int64]
    pairs: NDArray[np.int64]
    tokens: NDArray[np.uint8]
    codes: NDArray[np.uint8]


class DraftError(ValueError):
    """A draft's file is missing, damaged or for another vocabulary; the message names it."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft's tables, as in NgramTables. vocabulary (V): the code points of the tokens' characters."""

    vocabulary: NDArray[np.uint32]
    first: NDArray[np.uint8]
    starts: NDArray[np.uint32]
    records: NDArray[np.uint8]

    def unpacked(self) -> Records:
        """The records, checked. Raises ValueError if the tables are damaged."""
        starts, records, V = self.starts.astype(np.int64), self.records, len(self.first)
        if not 0 < V <= MOST_VOCABULARY:
            raise ValueError(f"the draft's vocabulary is {V}; it must be from 1 to {MOST_VOCABULARY}")
        bits = max(1, len(starts) - 1).bit_length() - 1
        if bits == 0 or len(starts) != (1 << bits) + 1 or bits > MOST_BITS:
            raise ValueError(f"the draft has {len(starts) - 1} buckets; it must be a power of 2 above 1")
        if not self.first.any():
            raise ValueError("the draft holds no probabilities")
        if starts[0] != 0 or starts[-1] != len(records) or (np.diff(starts) < 0).any():
            raise ValueError("the draft's buckets do not fit its records")
        at, end = starts[:-1].copy(), starts[1:]
        found = [np.empty((5, 0), np.int64)]  # of each bucket the next record
        bucket = np.flatnonzero(at < end)
        while len(bucket):
            begin = at[bucket]
            if (begin + HEAD > end[bucket]).any():
                raise ValueError("a record of the draft leaves its bucket")
            low, high, factor = (records[begin + i].astype(np.int64) for i in range(HEAD))
            at[bucket] += HEAD + PAIR * (high >> 2)
            if (at[bucket] > end[bucket]).any():
                raise ValueError("a record of the draft leaves its bucket")
            found.append(np.stack([bucket, low | (high & 3) << 8, factor, high >> 2, begin + HEAD]))
            bucket = bucket[at[bucket] < end[bucket]]
        bucket, tag, factor, count, begin = np.concatenate(found, axis=1)
        first = np.cumsum(count) - count
        place = np.repeat(begin - PAIR * first, count) + PAIR * np.arange(count.sum())
        tokens, codes = records[place], records[place + 1]
        if (tokens >= V).any():
            raise ValueError("a token of the draft is outside its vocabulary")
        named = np.repeat(np.arange(len(count)), count) * V + tokens
        if len(np.unique(named)) < len(named):
            raise ValueError("a record of the draft names a token twice")
        return Records(bits, bucket, tag, factor, first, count, tokens, codes)

    def save(self, directory: Path) -> Path:
        """Write the file into a model's directory; returns its path."""
        path = directory / FILE
        write_file(path, safetensors.numpy.save({name: getattr(self, name) for name in TENSORS}))
        return path


def code_points(tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """The code points of a vocabulary of characters; none of another one."""
    characters = tokenizer.characters if isinstance(tokenizer, CharTokenizer) else []
    return np.array([ord(c) for c in characters], np.uint32)


def load(path: Path, tokenizer: Tokenizer) -> Draft:
    """Read a draft for a vocabulary. Raises DraftError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; it must have at most {MOST_BYTES:,}")
        stored = dict(safetensors.deserialize(path.read_bytes()))
        if found := sorted(stored.keys() ^ TENSORS.keys()):
            raise ValueError(f"tensor {found[0]} is missing or unexpected")
        tensors: dict[str, Any] = {}
        for name, kind in TENSORS.items():
            if stored[name]["dtype"] != kind or len(stored[name]["shape"]) != 1:
                raise ValueError(f"tensor {name} must be a row of {kind}")
            of = np.uint8 if kind == "U8" else np.uint32
            tensors[name] = np.frombuffer(stored[name]["data"], of).copy()
        if not np.array_equal(tensors["vocabulary"], code_points(tokenizer)):
            raise ValueError("it is for another vocabulary")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DraftError(f"{path} is no draft for this model: {reason}") from None
    return Draft(**tensors)
