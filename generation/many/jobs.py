"""A request for many texts, its shards, and the manifest: the record of those that are complete."""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.checks import set_whole, whole_number
from shakespeare.attention_ext.parts import one_of
from shakespeare.generation.engines.engine import EngineOptions
from shakespeare.generation.engines.table import ENGINES
from shakespeare.generation.many import SHARD_SIZE
from shakespeare.generation.many.shards import Settings, Task
from shakespeare.generation.many.stores import Store
from shakespeare.generation.sampling import LARGEST_SEED, RANDOM, drawn_seed
from shakespeare.model import corpus

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
VERSION = 2  # of the manifest's format
RESOLVED = {"engine", "simd", "br", "bc"}  # what shards.resolved() may choose


class BulkError(ValueError):
    """A job that cannot begin or continue; the message says why."""


@dataclass
class Job:
    """A request for many texts. texts: their number, or the number of lines of a prompts file.

    resolved: what shards.resolved() chose in the directory's first run. Raises BulkError for a wrong request.
    """

    settings: Settings
    texts: int
    shard_size: int = SHARD_SIZE
    prompts: "Prompts | None" = None
    resolved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_whole(self, "texts", "shard_size")
        for name, number in (("texts", self.texts), ("shard_size", self.shard_size)):
            if number < 1:
                raise BulkError(f"{name} is {number}; it must be at least 1")
        if self.settings.seed + self.texts - 1 > LARGEST_SEED:
            raise BulkError(f"seed is {self.settings.seed}; the last text's must be less than 2**63")

    def request(self) -> dict[str, Any]:
        """All that decides the bytes of the files, as JSON. The model's name is not part of it."""
        decides = {
            **asdict(self.settings),
            "texts": self.texts,
            "shard_size": self.shard_size,
            "prompts_sha256": self.prompts.sha256 if self.prompts else None,
        }
        del decides["model"]
        return json.loads(json.dumps(decides))

    def tasks(self) -> Iterator[Task]:
        """All shards, without their lines."""
        for first in range(0, self.texts, self.shard_size):
            yield Task(first, min(self.shard_size, self.texts - first))

    def with_lines(self, task: Task) -> Task:
        """The task with its lines of the prompts file, if there is one."""
        return replace(task, lines=self.prompts.read(task.first, task.count)) if self.prompts else task


class Prompts:
    """A prompts file: hash, number of lines, where each shard begins.

    Raises ValueError for UTF-16, BulkError once the file is another one.
    """

    def __init__(self, path: Path, shard_size: int) -> None:
        self.path = path
        self.lines = 0
        self._begins: list[int] = []
        self._size = shard_size
        digest = hashlib.sha256()
        at = 0
        with open(path, "rb") as file:
            self._before = os.fstat(file.fileno())
            for line in file:
                if not at and line.startswith(corpus.UTF_16):
                    corpus.decode(line, str(path))  # which refuses it
                if self.lines % shard_size == 0:
                    self._begins.append(at)
                digest.update(line)
                at += len(line)
                self.lines += 1
        self.sha256 = digest.hexdigest()

    def read(self, first: int, count: int) -> list[bytes]:
        """`count` lines from line `first`, the first of a shard."""
        with open(self.path, "rb") as file:
            file.seek(self._begins[first // self._size])
            lines = [file.readline() for _ in range(count)]
            now = os.fstat(file.fileno())
        if (now.st_ino, now.st_mtime_ns) != (self._before.st_ino, self._before.st_mtime_ns):
            raise BulkError(
                f"{self.path} was changed while the job ran; its texts are those of the file before"
            )
        return lines


class Manifest:
    """A job's record in its store, replaced as a whole. Raises BulkError for another's or if damaged."""

    content: dict[str, Any]

    def __init__(self, store: Store, out: str, job: Job) -> None:
        self.store = store
        self._saved_at = 0.0
        self._save_seconds = 0.0
        path = f"{out}/{MANIFEST}"
        other = "choose another directory"
        request = job.request()
        found = store.files()
        if MANIFEST not in found:
            if any(name.startswith("texts-") for name in found):
                raise BulkError(f"{out} has texts, but no {MANIFEST}; {other}")
            self.content = {
                "version": VERSION,
                "model": job.settings.model,
                "request": request,
                "resolved": job.resolved,
                "complete": False,
                "machines": {},
                "workers_lost": [],
                "failed": {},
                "shards": {},
            }
            return
        try:
            self.content = read(store)
            recorded = {**self.content["request"]}
            version = self.content["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BulkError(f"{path} is not a manifest; remove it, or {other}") from None
        if version != VERSION:
            raise BulkError(f"{path} has version {version}; this program writes {VERSION}")
        names = [name for name in recorded | request if recorded.get(name) != request.get(name)]
        if names:
            raise BulkError(f"{out} holds texts of another request ({', '.join(names)}); {other}")
        try:
            self._check(job)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BulkError(f"{path} was changed ({error}); remove it, or {other}") from None

    def _check(self, job: Job) -> None:
        """Raise an error for what no run of the job records; the directory may come from someone else."""
        content = self.content
        resolved = content["resolved"]
        unknown = resolved.keys() - RESOLVED
        if unknown:
            raise ValueError(f"resolved has {min(unknown)!r:.100}")
        EngineOptions.from_names(asdict(job.settings) | resolved)
        one_of("engine", resolved.get("engine", "native"), ENGINES)
        tasks = {file_of(task, job.settings): task for task in job.tasks()}
        for name, shard in self.shards.items():
            if name not in tasks:
                raise ValueError(f"the job has no file {name!r:.100}")
            numbers = [
                whole_number(number, shard[number]) for number in ("first", "count", "texts", "tokens")
            ]
            if numbers[:2] != [tasks[name].first, tasks[name].count]:
                raise ValueError(f"{name} holds other texts")
            len(shard["rejected"]), shard["sha256"], shard["stamp"]
        mix_of(content["machines"].values())
        [*content["workers_lost"]], {**content["failed"]}

    @property
    def shards(self) -> dict[str, dict]:
        """The complete shards, by the file's name."""
        return self.content["shards"]

    @property
    def texts(self) -> int:
        """Texts of the complete shards; rejected and empty lines count too."""
        return sum(shard["count"] for shard in self.shards.values())

    def check_files(self, verify: bool) -> list[str]:
        """Remove shards whose file is missing or changed from the record; return their names.

        A file is read if its stamp is another one than when it was written, or to verify it.
        """
        found = self.store.files()
        bad = []
        for name, shard in self.shards.items():
            stamp = found.get(name)
            if stamp and (verify or stamp != shard["stamp"]):
                with self.store.open(name) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                        stamp = None
            if stamp is None:
                bad.append(name)
            shard["stamp"] = stamp
        for name in bad:
            del self.shards[name]
        return bad

    def add(self, name: str, shard: dict[str, Any]) -> None:
        """Record a shard that a worker wrote. A mix of machines is logged, and each rejected line."""
        key = hash_of(shard["machine"])[:16]
        machines = self.content["machines"]
        differs = bool(machines) and key not in machines
        machines[key] = shard["machine"]
        if differs:
            log.warning(mix_of(machines.values()))
        for rejected in shard["rejected"]:
            log.warning(f"line {rejected['line']}: {rejected['error']}")
        self.content["failed"].pop(name, None)
        self.shards[name] = shard | {"machine": key}

    def save(self, lazily: bool = False) -> None:
        """Replace the file. lazily: skip it if writing would take most of the time."""
        start = time.monotonic()
        if lazily and start - self._saved_at < 20 * self._save_seconds:
            return
        self.content["shards"] = dict(sorted(self.shards.items()))
        self.store.write(MANIFEST, (json.dumps(self.content, indent=1) + "\n").encode())
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - start


def read(store: Store) -> Any:
    """The content of a store's manifest. Raises FileNotFoundError, or ValueError if it is no JSON."""
    with store.open(MANIFEST) as file:
        return json.load(file)


def seed_for(store: Store) -> int:
    """The seed that a store's manifest records, else a random one."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return whole_number("seed", read(store)["request"]["seed"])
    return drawn_seed(RANDOM)


def hash_of(content: dict) -> str:
    """The SHA-256 of JSON with sorted names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_of(task: Task, settings: Settings) -> str:
    """The name of a shard's file."""
    return f"texts-{task.first:012d}.{settings.format}"


def mix_of(machines) -> str:
    """The line that reports shards of unlike machines."""
    names = sorted({f"{machine['processor']} ({machine['instructions']})" for machine in machines})
    alike = len({machine.get("features") for machine in machines}) == 1
    what = "unlike versions" if alike else "processors with different instruction sets"
    return f"warning: shards come from {what} ({'; '.join(names)}): another run may give other bytes"
