"""Tiny Shakespeare: its place, its checksum, and the split for training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
INPUT = Path("data", "shakespeare_char", "input.txt")  # in the current folder

Ids = TypeVar("Ids", bound=Sequence)


def split(ids: Ids) -> tuple[Ids, Ids]:
    """The first 90 % for training and the last 10 % for validation, as in nanoGPT."""
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:]  # type: ignore[return-value]


def read(path: Path) -> str:
    """Read a file's text, see decode()."""
    return decode(path.read_bytes(), str(path))


def decode(data: bytes, name: str) -> str:
    """Decode UTF-8 and turn CRLF into newlines. Raises ValueError naming `name` if it is not UTF-8."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 at byte {error.start}; it must be text") from None


def is_tiny_shakespeare(text: str) -> bool:
    """Whether this is the text that the shipped checkpoints were trained on."""
    return hashlib.sha256(text.encode()).hexdigest() == SHA256
