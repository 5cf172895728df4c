"""A request for many texts, its shards, and the manifest: the record of those that are complete."""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.checks import type_text
from shakespeare.generation.many import SHARD_SIZE
from shakespeare.generation.many.shards import Settings, Task
from shakespeare.generation.many.stores import MANIFEST, Store
from shakespeare.generation.sampling import LARGEST_SEED
from shakespeare.model import corpus

log = logging.getLogger(__name__)
VERSION = 3  # of the manifest's format


class BulkError(ValueError):
    """A job that cannot begin or continue; the message says why."""


@dataclass
class Job:
    """A request for many texts. texts: their number, or the number of lines of a prompts file.

    drawn: whether the seed is a random one, in whose place a job that goes on takes the recorded one. Raises
    BulkError for a wrong request.
    """

    settings: Settings
    texts: int
    shard_size: int = SHARD_SIZE
    prompt: "str | Prompts" = "\n"
    drawn: bool = False

    def __post_init__(self) -> None:
        if self.texts < 1 and isinstance(self.prompt, Prompts):
            raise BulkError(f"{self.prompt.path} is empty; it must have a prompt in each line")
        if self.texts < 1:
            raise BulkError(f"texts is {self.texts}; it must be at least 1")
        seed = self.settings.request.seed
        if seed + self.texts - 1 > LARGEST_SEED:
            raise BulkError(f"seed is {seed}; the last text's must be less than 2**63")

    def request(self) -> dict[str, Any]:
        """All that decides the bytes of the files, as JSON. The model's name is not part of it."""
        decides = {
            **asdict(self.settings.engine),
            **asdict(self.settings.request),
            "fingerprint": self.settings.fingerprint,
            "format": self.settings.format,
            "texts": self.texts,
            "shard_size": self.shard_size,
            "prompt": self.prompt if isinstance(self.prompt, str) else self.prompt.sha256,
        }
        del decides["ids"]  # the prompt's
        return json.loads(json.dumps(decides))

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """All shards, without their lines, by their files' names."""
        size = self.shard_size
        tasks = [
            Task(f"texts-{first:012d}.{self.settings.format}", first, min(size, self.texts - first))
            for first in range(0, self.texts, size)
        ]
        return {task.name: task for task in tasks}


class Prompts:
    """A prompts file: hash, number of lines, where each shard begins.

    Raises ValueError for UTF-16, BulkError once the file is another one.
    """

    def __init__(self, path: Path, shard_size: int) -> None:
        self.path = path
        self.lines = 0
        self._begins = {0: 0}  # a shard's first line, and where it begins in the file
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            self._before = os.fstat(file.fileno())
            for line in file:
                if self.lines == 0 and line.startswith(corpus.UTF_16):
                    corpus.decode(line, str(path))  # which refuses it
                digest.update(line)
                self.lines += 1
                if self.lines % shard_size == 0:
                    self._begins[self.lines] = file.tell()
        self.sha256 = digest.hexdigest()

    def of(self, task: Task) -> Task:
        """A task with its lines."""
        with open(self.path, "rb") as file:
            file.seek(self._begins[task.first])
            lines = [file.readline() for _ in range(task.count)]
            now = os.fstat(file.fileno())
        if (now.st_ino, now.st_mtime_ns) != (self._before.st_ino, self._before.st_mtime_ns):
            raise BulkError(
                f"{self.path} was changed while the job ran; its texts are those of the file before"
            )
        return replace(task, lines=lines)


class Manifest:
    """A job's record in its store, replaced as a whole. settings: the job's, with the recorded seed.

    Shards whose file is missing or was changed are logged and removed from the record. A file is read if its
    stamp is another one than when it was written, or to verify it. Raises BulkError for another job's or if
    it is damaged.
    """

    def __init__(self, store: Store, out: str, job: Job, verify: bool = False) -> None:
        self.store = store
        self.job = job
        self._saved = b""  # what is in the file
        request = job.request()
        self.content: dict[str, Any] = {
            "version": VERSION,
            "model": job.settings.model,
            "request": request,
            "machines": [],
            "workers_lost": [],
            "failed": {},
            "shards": {},
        }
        files = store.files()
        other = "choose another directory"
        try:
            if MANIFEST in files:
                self._read()
            elif any(name.startswith("texts-") for name in files):
                raise BulkError(f"{out} has texts, but no {MANIFEST}; {other}")
            recorded = self.content["request"]
            if job.drawn:
                request["seed"] = recorded["seed"]
            names = [name for name in recorded | request if recorded.get(name) != request.get(name)]
            if names:
                raise BulkError(f"{out} holds texts of another request ({', '.join(names)}); {other}")
            first = replace(job.settings.request, seed=request["seed"])
            self.settings = replace(job.settings, request=first)
            self._check_files(files, verify)
            self.totals()  # which raises an error for a record without its numbers
        except BulkError:
            raise
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BulkError(
                f"{out}/{MANIFEST} cannot be continued ({error}); remove it, or {other}"
            ) from None

    def _read(self) -> None:
        with self.store.open(MANIFEST) as file:
            self._saved = file.read()
        found = json.loads(self._saved)
        if found["version"] != VERSION:
            raise ValueError(f"its version is {found['version']}; this program writes {VERSION}")
        for name, empty in self.content.items():
            if type(found[name]) is not type(empty):
                raise TypeError(f"{name} is {type_text(found[name])}")
        self.content = found

    def _check_files(self, files: dict[str, list], verify: bool) -> None:
        """Keep the job's shards whose files are there and unchanged."""
        found = self.shards
        self.content["shards"] = {}
        changed = []
        for name in filter(found.__contains__, self.job.tasks):
            shard = found[name]
            stamp = files.get(name)
            if stamp and (verify or stamp != shard["stamp"]):
                with self.store.open(name) as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                        stamp = None
            if stamp:
                self.shards[name] = shard | {"stamp": stamp}
            else:
                changed.append(name)
        if changed:
            log.warning(
                f"{len(changed)} files are missing or changed, the first is {changed[0]}; "
                "they are written again"
            )

    @property
    def shards(self) -> dict[str, dict[str, Any]]:
        """The complete shards, by the file's name."""
        return self.content["shards"]

    def totals(self) -> tuple[int, int, int]:
        """The texts, the tokens and the rejected lines of the complete shards."""
        shards = self.shards.values()
        rejected = sum(len(shard["rejected"]) for shard in shards)
        return sum(shard["texts"] for shard in shards), sum(shard["tokens"] for shard in shards), rejected

    def add(self, name: str, shard: dict[str, Any]) -> None:
        """Record a shard that a worker wrote. A mix of machines is logged, and each rejected line."""
        machine = shard["machine"]
        machines = self.content["machines"]
        if machine not in machines:
            machines.append(machine)
            if len(machines) > 1:
                log.warning(
                    f"warning: {name} comes from {machine['processor']}, others from unlike processors or "
                    f"versions, see {MANIFEST}: another run may give other bytes"
                )
        for rejected in shard["rejected"]:
            log.warning(f"line {rejected['line']}: {rejected['error']}")
        self.content["failed"].pop(name, None)
        self.shards[name] = shard | {"machine": machines.index(machine)}

    def save(self) -> None:
        """Replace the file, if anything has changed."""
        self.content["complete"] = len(self.shards) == len(self.job.tasks)
        self.content["shards"] = dict(sorted(self.shards.items()))
        data = (json.dumps(self.content, indent=1) + "\n").encode()
        if data != self._saved:
            self.store.write(MANIFEST, data, new=not self._saved)
            self._saved = data
