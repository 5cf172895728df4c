"""A request for many texts, and its shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from generation.shards import Settings, Task

SHARD_SIZE = 1024


class BulkError(ValueError):
    """A job that cannot begin or continue; the message says why."""


@dataclass
class Job:
    """A request for many texts. texts: their number, which is the number of lines of a prompts file.

    resolved: the values of the settings that were 'auto', from shards.resolved(). A directory keeps those of
    its first run.
    Raises BulkError for a wrong request.
    """

    settings: Settings
    texts: int
    shard_size: int = SHARD_SIZE
    prompts: Prompts | None = None
    resolved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in (("texts", self.texts), ("shard_size", self.shard_size)):
            if number < 1:
                raise BulkError(f"{name} is {number}; it must be at least 1")
        if self.settings.seed + self.texts > 2**63:
            raise BulkError(f"seed is {self.settings.seed}; the last text's must be less than 2**63")

    def request(self) -> dict[str, Any]:
        """All that decides the bytes of the files, as JSON. The model's name is not part of it."""
        what = asdict(self.settings) | {"texts": self.texts, "shard_size": self.shard_size}
        what |= {"prompts_sha256": self.prompts.sha256 if self.prompts else None}
        del what["model"]
        return json.loads(json.dumps(what))

    def tasks(self) -> Iterator[Task]:
        """All shards, without their lines."""
        for first in range(0, self.texts, self.shard_size):
            yield Task(first, min(self.shard_size, self.texts - first))

    def with_lines(self, task: Task) -> Task:
        """The task with its lines of the prompts file, if there is one."""
        if self.prompts is None:
            return task
        return replace(task, lines=self.prompts.read(task.first, task.count))


class Prompts:
    """A prompts file: its hash, its number of lines, and where each shard's lines begin."""

    def __init__(self, path: Path, shard_size: int) -> None:
        self.path, self.lines, self._begins = path, 0, dict[int, int]()
        digest, at = hashlib.sha256(), 0
        with open(path, "rb") as file:
            for line in file:
                if self.lines % shard_size == 0:
                    self._begins[self.lines] = at
                digest.update(line)
                at += len(line)
                self.lines += 1
        self.sha256 = digest.hexdigest()

    def read(self, first: int, count: int) -> list[bytes]:
        """`count` lines from line `first`, the first of a shard."""
        with open(self.path, "rb") as file:
            file.seek(self._begins[first])
            return [file.readline() for _ in range(count)]
