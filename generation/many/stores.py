"""Where a job's files lie: a folder, or a URL of fsspec. A file has its name only when it is complete."""

import contextlib
import functools
import re
import secrets
from pathlib import Path
from typing import Any

from shakespeare.model.files import UNFINISHED, locked, write_file

MANIFEST = "manifest.json"
LOCK = ".texts.lock"
LEFT = re.compile(rf"(texts-.*|{MANIFEST})\.[0-9a-f]{{8}}{UNFINISHED}")  # by a process that was killed
VERSIONS = ("ETag", "etag", "mtime", "updated", "LastModified")  # what changes with a file, as stores name it
Stamp = list  # a file's bytes, and its time or ETag


@contextlib.contextmanager
def _errors_as_of_a_disk():
    """Let each error be an OSError; a store's library has its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


class Store:
    """A folder, which is locked and synced, or a URL. Raises ValueError if fsspec cannot open the URL."""

    def __init__(self, out: str) -> None:
        import fsspec  # the command line starts without it
        from fsspec.implementations.dirfs import DirFileSystem

        self._path = None
        if "://" in out:
            try:
                system, root = fsspec.url_to_fs(out)
            except Exception as error:  # each store's library has its own
                raise ValueError(f"out is {out!r}: {error}") from None
        else:
            self._path = Path(out).resolve()
            system = fsspec.filesystem("file")
            root = str(self._path)
        self._folder = DirFileSystem(root, system)
        # fsspec's own mv() copies: such a store cannot rename, and shows an object when it has all of it.
        self._renames = type(system).mv is not fsspec.AbstractFileSystem.mv

    @contextlib.contextmanager
    def locked(self):
        """Make the folder, where a store has any, and lock it; remove what was left if the block succeeds.

        Raises ValueError if another process has the lock. A URL has none.
        """
        if self._renames:
            self._folder.makedirs("", exist_ok=True)
        with locked(self._path / LOCK, "writes texts") if self._path else contextlib.nullcontext():
            yield
            for name in filter(LEFT.fullmatch, self.files()):
                self._folder.rm_file(name)

    @_errors_as_of_a_disk()
    def files(self) -> dict[str, Stamp]:
        """The stamp of each file, by its name."""
        self._folder.invalidate_cache()
        try:
            return {file["name"]: _stamp(file) for file in self._folder.ls("", detail=True)}
        except FileNotFoundError:  # an empty folder of a store without folders
            return {}

    @_errors_as_of_a_disk()
    def open(self, name: str) -> Any:
        """A file, to read it. Raises FileNotFoundError."""
        return self._folder.open(name)

    @_errors_as_of_a_disk()
    def write(self, name: str, data: bytes, new: bool = False) -> Stamp:
        """Write a file completely, or not at all. new: raise FileExistsError if there is one, on S3."""
        if self._path:
            write_file(self._path / name, data)
        elif self._renames:
            unfinished = f"{name}.{secrets.token_hex(4)}{UNFINISHED}"
            self._folder.pipe_file(unfinished, data)
            self._folder.mv(unfinished, name)
        else:
            self._folder.pipe_file(name, data, mode="create" if new else "overwrite")
        return _stamp(self._folder.info(name))


def _stamp(file: dict[str, Any]) -> Stamp:
    return [file["size"], " ".join(str(file[name]) for name in VERSIONS if name in file)]


open_store = functools.cache(Store)
