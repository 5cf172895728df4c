"""What the tests of bulk jobs share: pools without processes, and what a finished directory must hold."""

import hashlib
import json
from collections import deque
from functools import partial
from pathlib import Path

from shakespeare.generation.many import bulk, cluster
from shakespeare.generation.many.jobs import MANIFEST
from shakespeare.generation.many.shards import Scribe, Task

TEXTS, SIZE = 46, 4  # the last file has fewer texts than the others
TOKENS = 200  # of a text, beyond the model's window
SLOW = 3000  # where a file must take longer than a kill


class Here:
    """A Pool without processes. faults: what happens to each task in turn; None lets it be written."""

    workers = 1

    def __init__(self, settings, shards, faults=()) -> None:
        self.scribe, self.given, self.faults = Scribe(settings), deque[Task](), deque(faults)

    @property
    def idle(self) -> int:
        return 1 - len(self.given)

    def give(self, task) -> None:
        self.given.append(task)

    def wait(self):
        task, fault = self.given.popleft(), self.faults.popleft() if self.faults else None
        if isinstance(fault, BaseException):
            raise fault
        return [(task, fault or self.scribe.write(task))]

    def close(self) -> None:
        pass


def here(*faults):
    return lambda settings, shards: Here(settings, shards, faults)


def files(directory: Path, form="jsonl") -> dict[str, str]:
    """The hash of each file of texts."""
    found = sorted(directory.glob(f"texts-*.{form}"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in found}


def rows(directory: Path) -> list[dict]:
    text = "".join(file.read_text() for file in sorted(directory.glob("texts-*")))
    return [json.loads(line) for line in text.splitlines()]


def check(directory: Path, expected: dict[str, str], texts: int = TEXTS) -> dict:
    """Check a finished job's files against its manifest and these hashes; return the manifest."""
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest["complete"] and files(directory) == expected
    assert {name: shard["sha256"] for name, shard in manifest["shards"].items()} == expected
    assert [row["index"] for row in rows(directory)] == list(range(texts))  # none lost, none twice
    assert {file.name for file in directory.iterdir()} == {MANIFEST, *expected}
    return manifest


def drive(job, out: Path, address: str) -> None:
    """A driver in a process of its own, on a Ray cluster."""
    bulk.run(job, out, partial(cluster.open_pool, address, None))
