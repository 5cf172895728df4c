"""Files that are replaced as a whole, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNFINISHED = ".unfinished"  # the suffix of a file that has not its name yet


def write_file(path: Path, data: bytes) -> None:
    """Write a file that exists either as a whole, on the disk, or not at all.

    Raises OSError; its filename is then the path, and nothing is left.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with open(unfinished, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # a rename is on the disk when its directory is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
