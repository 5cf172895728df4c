"""Where a job's files lie: a folder, or a URL of fsspec. A file has its name only when it is complete."""

import contextlib
import functools
import os
import secrets
from pathlib import Path
from typing import Any

from shakespeare.model.files import UNFINISHED, locked, remove_unfinished, write_file

MANIFEST = "manifest.json"
OURS = ("texts-*", MANIFEST)  # the files of a job
LOCK = ".texts.lock"
FILE = "file://"
VERSIONS = ("ETag", "etag", "mtime", "updated", "LastModified")  # what changes with a file, as stores name it
Stamp = list  # a file's bytes, and its time or ETag


class Folder:
    """A folder of this machine, or one that all machines share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def locked(self):
        """Make the folder and hold its lock; remove what killed processes left if the block succeeds.

        Raises ValueError if another process has the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / LOCK, "writes texts"):
            yield
            remove_unfinished(self.path, *OURS)

    def files(self) -> dict[str, Stamp]:
        """The stamp of each file, by its name."""
        found = {}
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # a worker of a killed driver has just renamed it
                found[entry.name] = self._stamp(entry.stat())
        return found

    def open(self, name: str) -> Any:
        """A file, to read it. Raises FileNotFoundError."""
        return open(self.path / name, "rb")

    def write(self, name: str, data: bytes) -> Stamp:
        """Write a file completely, or not at all."""
        write_file(self.path / name, data)
        return self._stamp((self.path / name).stat())

    @staticmethod
    def _stamp(status: os.stat_result) -> Stamp:
        return [status.st_size, str(status.st_mtime_ns)]


@contextlib.contextmanager
def _errors_as_of_a_disk():
    """Let each error be an OSError; a store's library has its own."""
    try:
        yield
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


class Remote:
    """A folder of a store that fsspec reaches; it has no locks. Raises OSError if there is no such store."""

    @_errors_as_of_a_disk()
    def __init__(self, url: str) -> None:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        system, root = fsspec.url_to_fs(url)
        self._folder = DirFileSystem(root, system)
        # fsspec's own mv() copies: such a store cannot rename, and shows an object when it has all of it.
        self._renames = type(system).mv is not fsspec.AbstractFileSystem.mv

    @contextlib.contextmanager
    def locked(self):
        """As Folder.locked(), without a lock; only a store that renames has folders and unfinished files."""
        if self._renames:
            self._folder.makedirs("", exist_ok=True)
        yield
        if self._renames:
            for name in OURS:
                for left in self._folder.glob(f"{name}.{'[0-9a-f]' * 8}{UNFINISHED}"):
                    self._folder.rm_file(left)

    @_errors_as_of_a_disk()
    def files(self) -> dict[str, Stamp]:
        """As Folder.files()."""
        self._folder.invalidate_cache()
        try:
            return {file["name"]: _stamp_of(file) for file in self._folder.ls("")}
        except FileNotFoundError:  # an empty folder of a store without folders
            return {}

    @_errors_as_of_a_disk()
    def open(self, name: str) -> Any:
        """As Folder.open()."""
        return self._folder.open(name)

    @_errors_as_of_a_disk()
    def write(self, name: str, data: bytes) -> Stamp:
        """As Folder.write()."""
        if self._renames:
            unfinished = f"{name}.{secrets.token_hex(4)}{UNFINISHED}"
            self._folder.pipe_file(unfinished, data)
            self._folder.mv(unfinished, name)
        else:
            self._folder.pipe_file(name, data)
        return _stamp_of(self._folder.info(name))


def _stamp_of(file: dict[str, Any]) -> Stamp:
    return [file["size"], " ".join(str(file[name]) for name in VERSIONS if name in file)]


Store = Folder | Remote


@functools.cache
def open_store(out: str) -> Store:
    """The store of a folder's name or of a URL. Raises OSError if fsspec does not reach it."""
    if "://" in out and not out.startswith(FILE):
        return Remote(out)
    return Folder(Path(out.removeprefix(FILE)).resolve())
