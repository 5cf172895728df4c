"""Texts from files; Tiny Shakespeare: its place, its checksum, the split for training and validation."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
INPUT = Path("data", "shakespeare_char", "input.txt")  # in the current folder

AT_ONCE = 2**16  # characters of a piece, whose numbers stay in a cache
MARK = "\ufeff"  # the byte order mark
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

LAST_TENTH = (0.9, 1.0)  # shares of a text between which models are evaluated
Ids = TypeVar("Ids", bound=Any)  # a text, a list, an array or a tensor


def split(ids: Ids, held_out: float = 0.1) -> tuple[Ids, Ids]:
    """The first 90 % for training and the last 10 %, or `held_out`, for validation, as in nanoGPT."""
    cut = int((1 - held_out) * len(ids))
    return ids[:cut], ids[cut:]


def pieces(text: str, overlap: int = 0) -> Iterator[NDArray[np.uint32]]:
    """The code points of a text, AT_ONCE at a time, and with each piece the `overlap` ones after it."""
    for start in range(0, len(text), AT_ONCE):
        piece = text[start : start + AT_ONCE + overlap]
        yield np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), "<u4")


def alphabet(text: str) -> list[str]:
    """The different characters of a text, sorted."""
    found: set[int] = set()
    for points in pieces(text):
        found.update(np.flatnonzero(np.bincount(points)).tolist())
    return list(map(chr, sorted(found)))


def read(path: Path) -> str:
    """Read a corpus: decode(), with newlines for old Macs' line ends, without the marks of joined files.

    Raises ValueError as decode() does, and for a folder, an empty file or a text with a NUL, such as
    nanoGPT's train.bin.
    """
    beside = (path if path.is_dir() else path.parent) / "input.txt"
    hint = f"; did you mean {beside}?" if beside.is_file() and beside != path else ""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; it must be a file of text{hint}")
    text = decode(path.read_bytes(), str(path), hint)
    if not text:
        raise ValueError(f"{path} is empty; it must be a file of text{hint}")
    at = text.find("\0")
    if at >= 0:
        what = f"holds a NUL, character {at}: it is binary, as nanoGPT's train.bin, or UTF-16"
        raise ValueError(f"{path} {what}; it must be text in UTF-8{hint}")
    return text.replace("\r", "\n").replace(MARK, "")


def decode(data: bytes, name: str, hint: str = "") -> str:
    """Decode UTF-8, drop a byte order mark, turn CRLF into newlines. Raises ValueError naming `name`."""
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        what = "UTF-16, which Windows calls Unicode" if data.startswith(UTF_16) else "not UTF-8"
        at = "" if data.startswith(UTF_16) else f" at byte {error.start}"
        raise ValueError(f"{name} is {what}{at}; it must be text in UTF-8{hint}") from None
    return text.removeprefix(MARK) or text  # a mark alone is a character
