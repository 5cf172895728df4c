"""Files that are replaced atomically, and directories with one writer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished"  # the suffix of a file while it is written


def write_file(path: Path, data: bytes) -> None:
    """Write a file completely, or leave nothing and raise OSError with the path as its filename."""
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
    folder = os.open(path.parent, os.O_RDONLY)  # the rename is on the disk when the directory is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(file: Path, does: str) -> Iterator[None]:
    """Hold a lock on a file; the kernel releases it when the process ends, however it ends.

    The file is removed at the end; that of a killed process stays until the next one ends. Raises ValueError
    if another process holds it: 'another process (PID) DOES in DIRECTORY'.
    """
    import fcntl

    while True:
        with open(file, "a+") as held:
            held.seek(0)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process ({held.read() or 'new'}) {does} in {file.parent}"
                ) from None
            if not _is_still(held.fileno(), file):  # its owner removed it between open() and flock()
                continue
            held.truncate(0)
            held.write(str(os.getpid()))
            held.flush()
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    file.unlink()  # while it is locked, so that it is no other process's
            return


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether an open file still has this name; another one may have got it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
