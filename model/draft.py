"""draft.safetensors beside a model: the likeliest next tokens after the last few, for guesses at writing.

It holds no text: only contexts of at most five tokens that the text repeats, by their hashes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from shakespeare.model.files import write_file
from shakespeare.model.tokenizer import CharTokenizer, Tokenizer

FILE = "draft.safetensors"
ORDER = 5  # the most tokens of a context
BUCKETS = 2**13  # of the table
WAYS = 4  # contexts of a bucket
LISTED = 8  # tokens of a context
BUCKET_SHIFT = 51  # of a hash: its bits above are the bucket's number
TAG_SHIFT = 19
FACTOR = 0x9E3779B97F4A7C15  # of a hash
# The same for generation/csrc/cuda/ngrams_table.h; 64 bits of a macro have a sign.
MACROS = {
    "ORDER": ORDER,
    "CONTEXTS": BUCKETS * WAYS,
    "WAYS": WAYS,
    "LISTED": LISTED,
    "BUCKET_SHIFT": BUCKET_SHIFT,
    "TAG_SHIFT": TAG_SHIFT,
    "FACTOR": FACTOR - 2**64,
}
MOST_BYTES = 2**20  # of a file
MOST_VOCABULARY = 256  # a token takes a byte


class DraftError(ValueError):
    """A draft's file is missing, damaged or for another vocabulary; the message names it."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A table of contexts, in the bucket that a context's hash names.

    vocabulary (V): the code points of the tokens' characters. tags (BUCKETS, WAYS): more bits of the hash.
    pairs (BUCKETS, WAYS, LISTED, 2): the likeliest next tokens and the codes of their probabilities; a code c
    stands for (c / 255)^2. Raises ValueError for other shapes, types or tokens.
    """

    vocabulary: NDArray[np.uint32]
    tags: NDArray[np.uint32]
    pairs: NDArray[np.uint8]

    def __post_init__(self) -> None:
        shapes = {"vocabulary": (self.vocabulary.size,), "tags": (BUCKETS, WAYS)}
        shapes["pairs"] = (BUCKETS, WAYS, LISTED, 2)
        for name, shape in shapes.items():
            array = getattr(self, name)
            dtype = "uint8" if name == "pairs" else "uint32"
            if (array.dtype, array.shape) != (dtype, shape):
                raise ValueError(f"{name} is {array.dtype} {array.shape}; it must be {dtype} {shape}")
            if not array.flags.c_contiguous:  # engines read its memory
                raise ValueError(f"{name} has gaps; it must be contiguous")
        if (self.pairs[..., 0] >= len(self.vocabulary)).any():
            raise ValueError("a token is outside its vocabulary")

    def save(self, directory: Path) -> Path:
        """Write the file into a model's directory; returns its path."""
        path = directory / FILE
        write_file(path, safetensors.numpy.save(asdict(self)))
        return path


def hashes(recent: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """The hashes of contexts of so many tokens, a byte each, as context_hash() in ngrams_table.h."""
    return (recent | length << 8 * ORDER).astype(np.uint64) * np.uint64(FACTOR)


def code_points(tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """The code points of a vocabulary of characters; none of another one."""
    characters = tokenizer.characters if isinstance(tokenizer, CharTokenizer) else []
    return np.array([ord(c) for c in characters], np.uint32)


def load(path: Path, tokenizer: Tokenizer) -> Draft:
    """Read a draft for a vocabulary. Raises DraftError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; it must have at most {MOST_BYTES:,}")
        stored = safetensors.numpy.load(path.read_bytes())
        if stored.keys() != Draft.__annotations__.keys():
            raise ValueError("it holds other tensors; 'gpt.py draft' makes a new one")
        draft = Draft(**stored)
        if not np.array_equal(draft.vocabulary, code_points(tokenizer)):
            raise ValueError("it is for another vocabulary")
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, KeyError):  # a type that NumPy lacks
            reason = "it holds other tensors"
        raise DraftError(f"{path} is no draft for this model: {reason}") from None
    return draft
