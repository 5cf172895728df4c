"""Files that are replaced atomically or mapped, and directories with one writer."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from shakespeare.attention_ext.build.cache import lock, warn_unsupported

UNFINISHED = ".unfinished"  # the suffix of a file while it is written
PID_DIGITS = 20  # more than any has


def write_file(path: Path, data: bytes) -> None:
    """Write a file completely, as replacing()."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside a path for a file that the block writes, which then replaces that at the path.

    Each call has a name of its own, so several processes may write a path. An error leaves nothing; an
    OSError gets the path as its filename.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield unfinished
        with open(unfinished, "r+b") as written:
            _sync(written.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
            error.filename2 = None
        raise
    if sys.platform == "win32":
        return  # it opens no directory
    folder = os.open(path.parent, os.O_RDONLY)  # the rename is on the disk when the directory is
    try:
        _sync(folder)
    finally:
        os.close(folder)


def remove_unfinished(directory: Path, *names: str) -> None:
    """Remove what killed processes left of files that replacing() writes; names are patterns of glob()."""
    for name in names:
        for left in directory.glob(f"{name}.{'[0-9a-f]' * 8}{UNFINISHED}"):
            left.unlink()


def _sync(descriptor: int) -> None:
    """fsync(); a disk that does not have it for this kind of file gives a warning."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        warn_unsupported(error, "fsync", "a power failure may lose what was written last")


# The tensors of a file by their names: the shape, and a function that makes the array; it raises ValueError.
Stored = dict[Any, tuple[tuple[int, ...], Callable[[], np.ndarray]]]
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}  # safetensors' names
LEAST_MAPPED = 2**25  # bytes; a smaller file may be written over while its model is in use
NO_FLOATS = "must be a dense tensor of floats"


def tensors_of(path: Path) -> tuple[Stored, Callable[[], object]]:
    """The tensors of a safetensors file. A large file is mapped: its float32 tensors are read-only views.

    Also what drops the pages that were read so far from this process's memory; they are read again if need
    be. Raises OSError, or safetensors.SafetensorError for a malformed file.
    """
    with safetensors.safe_open(path, "numpy"):  # type: ignore[no-untyped-call]  # it checks the header
        pass
    drop: Callable[[], object] = list
    with open(path, "rb") as file:
        data: mmap.mmap | bytearray
        if os.fstat(file.fileno()).st_size < LEAST_MAPPED:
            data = bytearray(file.read())
        else:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_DONTNEED"):  # Windows has none
                drop = partial(data.madvise, mmap.MADV_DONTNEED)
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    stored: Stored = {n: (tuple(t["shape"]), partial(_decoded, data, begin, t)) for n, t in header.items()}
    return stored, drop


def _decoded(data: mmap.mmap | bytearray, begin: int, stored: dict[str, Any]) -> np.ndarray:
    """The array of a tensor of a safetensors file. bfloat16, which NumPy lacks, becomes float32."""
    dtype = stored["dtype"]
    first, end = stored["data_offsets"]
    content = memoryview(data)[begin + first : begin + end]
    if dtype == "BF16":
        flat = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype in FLOATS:
        flat = np.frombuffer(content, FLOATS[dtype])
        flat = flat if flat.flags.aligned else flat.copy()
    else:
        raise ValueError(NO_FLOATS)
    return flat.reshape(stored["shape"])


def is_mapped(array: np.ndarray) -> bool:
    """Whether an array is a view of a file's map, which tensors_of() made."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return isinstance(array.base, memoryview) and isinstance(array.base.obj, mmap.mmap)


@contextlib.contextmanager
def locked(file: Path, does: str) -> Iterator[None]:
    """Hold a lock on a file; the kernel releases it when the process ends, however it ends.

    The file is removed at the end; that of a killed process stays until the next one ends. Raises ValueError
    if another process holds it: 'another process (PID) DOES in DIRECTORY', or if it is another kind of file.
    """
    while True:
        with open(file, "a+", errors="replace", opener=_open) as lock_file:
            lock_file.seek(1)  # nobody else reads the first byte, which is locked on Windows
            owner = lock_file.read(PID_DIGITS)
            if owner and not owner.isdigit():
                raise ValueError(
                    f"{file} is not a lock of this program; remove it, or choose another directory"
                )
            who = f"another process ({owner or 'new'})"
            if not lock(lock_file.fileno(), wait=False):
                raise ValueError(f"{who} {does} in {file.parent}")
            if not _is_still(lock_file.fileno(), file):  # its owner removed it between open() and lock()
                continue
            lock_file.truncate(0)
            lock_file.write(f" {os.getpid()}")
            lock_file.flush()
            try:
                yield
            finally:
                if sys.platform == "win32":
                    lock_file.close()  # it removes no open file, whoever has opened it
                with contextlib.suppress(OSError):
                    file.unlink()  # while it is locked, so that it is no other process's
            return


def _open(path: str, flags: int) -> int:
    """Open a file, but not what a link names."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether an open file still has this name; another one may have got it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
