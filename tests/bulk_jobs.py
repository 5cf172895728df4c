"""What the tests of bulk jobs share: workers without processes, and what a finished folder must hold."""

import hashlib
import json
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from shakespeare.generation.many import bulk, workers
from shakespeare.generation.many.jobs import MANIFEST

TEXTS, SIZE = 46, 4  # the last file has fewer texts than the others
TOKENS = 200  # of a text, beyond the model's window
SLOW = 10_000  # where a file must take longer than a kill: some two seconds of two cores in all


class Death(Exception):
    """A worker's, as its pool or Ray tells it."""


class Here:
    """A Worker without a process. faults: what happens to each task in turn; None lets it be written."""

    def __init__(self, order, faults=()) -> None:
        self.order, self.faults = order, deque(faults)

    def start(self, task) -> Future:
        future: Future = Future()
        fault = self.faults.popleft() if task and self.faults else None
        if isinstance(fault, Death):
            future.set_exception(fault)
        elif fault:
            raise fault
        else:
            future.set_result(workers.work(self.order, task))
        return future

    def end(self) -> None:
        workers._scribe.cache_clear()


def here(*faults):
    return lambda order, shards: [Here(order, faults)]


def processes(count):
    """Workers in processes of this machine."""
    with workers.here("cpu", count, None) as made:
        return made


def asking(settings, **changes):
    """The settings with another request."""
    return replace(settings, request=replace(settings.request, **changes))


def run(job, directory, open_workers=None, **more) -> dict:
    """bulk.run() without processes; its manifest's content."""
    return bulk.run(job, str(directory), open_workers or here(), **more).content


def files(directory: Path, form="jsonl") -> dict[str, str]:
    """The hash of each file of texts."""
    found = sorted(directory.glob(f"texts-*.{form}"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in found}


def rows(directory: Path) -> list[dict]:
    text = "".join(file.read_text() for file in sorted(directory.glob("texts-*")))
    return [json.loads(line) for line in text.splitlines()]


def check(directory: Path, expected: dict[str, str]) -> dict:
    """Check a finished job's files against its manifest and these hashes; return the manifest."""
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest["complete"] and files(directory) == expected
    assert {name: shard["sha256"] for name, shard in manifest["shards"].items()} == expected
    assert [row["index"] for row in rows(directory)] == list(range(TEXTS))  # none lost, none twice
    assert {file.name for file in directory.iterdir()} == {MANIFEST, *expected}
    return manifest
