"""The build cache: where builds are kept, who may write there, and one build at a time.

A hash of everything that decides the result names a build's directory. A file lock guards it; the system
releases the lock of a killed build. Only a finished file gets the name that is loaded.
"""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.parts import BuildError

LOCK = "building"  # this file in a build's directory is locked while a process compiles there
MAX_BUILDS = 16  # builds of a name; each saved source makes one
BUILD_SECONDS = 600  # no build takes longer
ELSEWHERE = "TORCH_EXTENSIONS_DIR can name another directory"
# Errors of what a disk does not have, as flock and fsync on many disks of networks.
UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
log = logging.getLogger(__name__)
_compiling = threading.local()  # seconds: what this thread has waited so far


def clock() -> float:
    """time.perf_counter() without the seconds in which this thread waited for compilers: for speeds."""
    return time.perf_counter() - getattr(_compiling, "seconds", 0.0)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Let clock() stand still in this block."""
    start = clock()
    try:
        yield
    finally:
        _compiling.seconds = time.perf_counter() - start


def fingerprint(facts: Iterable[str | bytes], *paths: Path) -> str:
    """A hash, 16 hexadecimal digits, of these facts, of files and of every file below folders."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update((fact.encode() if isinstance(fact, str) else fact) + b"\0")
    for path in paths:
        for file in sorted(file for file in (path, *path.rglob("*")) if file.is_file()):
            name = file.relative_to(path.parent).as_posix()
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


Saves = dict[Path, tuple[int, int]]  # each file has its time of change and its size


def saves(files: Iterable[Path]) -> Saves:
    """What changes at a save of one of the files; a file that is missing is left out."""
    known = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            known[file] = status.st_mtime_ns, status.st_size
    return known


def latest(
    made: dict[Any, tuple[Any, Saves]], key: Any, make: Callable[[], Any], files: Callable[[], Iterable[Path]]
) -> Any:
    """What make() gives, again after a save of one of the files, which are known once it is made."""
    value, known = made.get(key, (None, {}))
    if not known or saves(known) != known:
        value = make()
        made[key] = value, saves(files())
    return value


def directory() -> Path:
    """$TORCH_EXTENSIONS_DIR, else torch_extensions in the user's cache. Raises BuildError without a home."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    try:
        return platformdirs.user_cache_path("torch_extensions", appauthor=False)
    except RuntimeError as error:
        raise BuildError(f"{error}; {ELSEWHERE}") from None


def folder(name: str) -> Path:
    """The folder of a build in the cache."""
    return resolved(directory()) / name


def check_owner(directory: Path) -> None:
    """Raise BuildError if others could write to a directory or replace it; /tmp's sticky bit is accepted."""
    if sys.platform == "win32":  # it has no such bits: the user's own folder is trusted
        return
    trusted = (0, os.geteuid(), os.stat("/").st_uid)  # root may have another id in a container
    directory = resolved(directory)
    for path in filter(Path.exists, (directory, *directory.parents)):
        status = path.stat()
        if status.st_uid not in trusted:
            why = f"belongs to user {status.st_uid}"
        elif status.st_mode & stat.S_ISVTX and path != directory:
            continue
        elif status.st_mode & stat.S_IWOTH:
            why = "can be written by everybody"
        elif status.st_mode & stat.S_IWGRP and not is_private(status.st_gid):
            why = f"can be written by group {status.st_gid}"
        else:
            continue
        must = "it must belong to you or root, and nobody else may write there"
        raise BuildError(f"{path} {why}, so its files are not trusted; {must}; {ELSEWHERE}")


def create(directory: Path) -> None:
    """Make a directory for this user alone, and those above it.

    Raises OSError, and BuildError as check_owner().
    """
    for path in (*reversed(directory.parents), directory):
        path.mkdir(mode=0o700, exist_ok=True)
    check_owner(directory)


def is_private(group: int) -> bool:
    """Whether a group is root's, or the user's own, as many systems give: of his name, without others."""
    import grp
    import pwd

    try:
        entry = grp.getgrgid(group)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return group == 0
    return group == 0 or (entry.gr_name == user and set(entry.gr_mem) <= {user})


def resolved(path: str | Path) -> Path:
    """The path with symbolic links resolved, because whoever can change a link decides what is loaded."""
    return Path(os.path.realpath(path))


def lock(descriptor: int, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False if another process has it and this one does not wait.

    Where the disk has no locks, this one goes on with a warning.
    """
    import filelock  # it takes a tenth of a second

    try:
        return filelock.lock_descriptor(descriptor, blocking=wait)
    except OSError as error:
        warn_unsupported(error, "file locks", "no other process must write there now")
        return True


def warn_unsupported(error: OSError, what: str, follows: str) -> None:
    """Warn that the disk does not have `what`, if that is what an error says; else raise it."""
    if error.errno not in UNSUPPORTED:
        raise error
    _warn_once(f"the disk has no {what} ({error.strerror}): {follows}")


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on path, after a notice if another process has it. Yields its descriptor."""
    with open(path, "w") as file:
        if not lock(file.fileno(), wait=False):
            log.warning("Waiting for another build...")
            lock(file.fileno())
        yield file.fileno()


def make(target: Path, what: str, write: Callable[[Path], Path]) -> None:
    """Make the file `made`, unless it exists: write(folder) makes it under a lock, then it is renamed.

    Raises BuildError if another user could have put it there, or the directory cannot be written.
    """
    directory = target.parent
    try:
        create(directory.parent)
        create(directory)
        if target.exists():
            return
        with uncounted(), locked(directory / LOCK):
            if target.exists():  # another process made it while this one waited
                return
            log.warning("Compiling %s...", what)  # a level that Python shows: it may take a minute
            # A killed build's compilers may still be writing to its folder, so it is never used again.
            for left in directory.glob(f"{tempfile.gettempprefix()}*"):
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as work:
                write(Path(work)).replace(target)
    except OSError as error:
        what = f"cannot write the build directory {directory}: {error.strerror}"
        raise BuildError(f"{what}; {ELSEWHERE}") from error


def texts_of(files: Sequence[Path]) -> dict[str, str]:
    """The texts of a file and of the others that lie below its folder, by their paths from there."""
    top = files[0].parent
    below = (file for file in files if file.is_relative_to(top))
    return {str(file.relative_to(top)): file.read_text("utf-8-sig", errors="replace") for file in below}


def kept(name: str, what: str, texts: Mapping[str, str]) -> Path:
    """A folder of these texts, by their paths there, among the builds. Raises BuildError as make() does."""

    def write(work: Path) -> Path:
        for place, text in texts.items():
            file = work / "texts" / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return work / "texts"

    named = fingerprint(word for item in texts.items() for word in item)
    made = folder(f"{name}_{named}") / "texts"
    make(made, what, write)
    prune(made.parent)
    return made


def prune(keep: Path) -> None:
    """Delete those of the builds named like `keep` that were used least recently, if they are many."""
    used = {}
    with contextlib.suppress(OSError):  # it may be read-only
        os.utime(keep)
    for path in keep.parent.glob(f"{keep.name.rpartition('_')[0]}_*"):
        with contextlib.suppress(FileNotFoundError):
            used[path] = path.stat().st_mtime
    for old in sorted(used, key=lambda path: used[path], reverse=True)[MAX_BUILDS:]:
        if old != keep and used[old] < time.time() - BUILD_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
