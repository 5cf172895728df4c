"""draft.safetensors beside a model: probabilities of the next token by the last few, for guesses at writing.

generation/csrc/ngrams.h describes the tables. They hold no text: only contexts of at most five tokens that
the text repeats, by their hashes. The file is not trusted; the decoder checks its tables when it takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from model.files import write_file
from model.tokenizer import CharTokenizer, Tokenizer

FILE = "draft.safetensors"
MOST_BYTES = 300_000  # of a file
TENSORS = {"vocabulary": "U32", "first": "U8", "starts": "U32", "records": "U8"}


class DraftError(ValueError):
    """A draft's file is missing, damaged or for another vocabulary; the message names it."""


@dataclass(frozen=True, eq=False)
class Draft:
    """The tables of a draft.

    vocabulary (V): the code points of the tokens' characters. first (V), starts, records: NgramTables.
    """

    vocabulary: NDArray[np.uint32]
    first: NDArray[np.uint8]
    starts: NDArray[np.uint32]
    records: NDArray[np.uint8]

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
