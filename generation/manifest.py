"""The directory of a job: its files, and the manifest that lists the complete ones."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from generation.jobs import BulkError, Job
from generation.shards import Settings, Shard, Task
from model.files import write_file

MANIFEST = "manifest.json"
VERSION = 1  # of the manifest's format


class Manifest:
    """The record of a job in its directory. It is replaced as a whole at each change.

    Raises BulkError if the directory holds another request, or an unreadable manifest.
    """

    def __init__(self, directory: Path, job: Job) -> None:
        self.path = directory / MANIFEST
        self._saved_at = self._save_seconds = 0.0
        request = job.request()
        if not self.path.exists():
            if any(directory.glob("texts-*")):
                raise BulkError(f"{directory} has texts, but no {MANIFEST}; choose another directory")
            self.content: dict[str, Any] = {
                "version": VERSION,
                "model": job.settings.model,
                "request": request,
                "request_sha256": hash_of(request),
                "resolved": job.resolved,
                "complete": False,
                "machines": {},
                "workers_lost": [],
                "failed": {},
                "shards": {},
            }
            return
        try:
            self.content = json.loads(self.path.read_text())
            found, version = self.content["request"], self.content["version"]
            self.shards.items(), self.content["resolved"].items(), found.items()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BulkError(
                f"{self.path} is not a manifest; remove it, or choose another directory"
            ) from None
        if version != VERSION:
            raise BulkError(f"{self.path} has version {version}; this program writes {VERSION}")
        if self.content.get("request_sha256") != hash_of(found):
            raise BulkError(f"{self.path} was changed: its request does not match request_sha256")
        if found != request:
            names = [name for name in {**found, **request} if found.get(name) != request.get(name)]
            raise BulkError(
                f"{directory} holds texts of another request ({', '.join(names)}); choose another directory"
            )

    @property
    def shards(self) -> dict[str, dict]:
        """The complete shards, by the file's name."""
        return self.content["shards"]

    @property
    def texts(self) -> int:
        """Texts of the complete shards; rejected and empty lines count too."""
        return sum(shard["count"] for shard in self.shards.values())

    def check_files(self) -> list[str]:
        """Remove shards whose file is missing or changed from the record; return their names."""
        bad = []
        for name, shard in self.shards.items():
            try:
                with open(self.path.parent / name, "rb") as file:
                    good = hashlib.file_digest(file, "sha256").hexdigest() == shard["sha256"]
            except FileNotFoundError:
                good = False
            if not good:
                bad.append(name)
        for name in bad:
            del self.shards[name]
        return bad

    def add(self, name: str, task: Task, shard: Shard, attempts: int) -> None:
        """Record a shard after its file was written."""
        key = hash_of(shard.machine)[:16]
        self.content["machines"][key] = shard.machine
        self.content["failed"].pop(name, None)
        self.shards[name] = {
            "first": task.first,
            "count": task.count,
            "sha256": hashlib.sha256(shard.data).hexdigest(),
            "bytes": len(shard.data),
            "texts": shard.texts,
            "tokens": shard.tokens,
            "rejected": [{"line": line, "error": error} for line, error in shard.rejected],
            "machine": key,
            "attempts": attempts,
            "seconds": round(shard.seconds, 3),
            "cpu_seconds": round(shard.cpu_seconds, 3),
        }

    def save(self, lazily: bool = False) -> None:
        """Replace the file. lazily: skip it if writing would take most of the time."""
        start = time.monotonic()
        if lazily and start - self._saved_at < 20 * self._save_seconds:
            return
        self.content["shards"] = dict(sorted(self.shards.items()))
        write_file(self.path, (json.dumps(self.content, indent=1) + "\n").encode())
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - start


def hash_of(content: dict) -> str:
    """The SHA-256 of JSON with sorted names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_of(task: Task, settings: Settings) -> str:
    """The name of a shard's file."""
    return f"texts-{task.first:012d}.{settings.format}"


def mix_of(machines) -> str:
    """The line that reports shards of unlike machines."""
    differ = [
        name
        for name in ("features", "instructions", "python", "torch", "shakespeare-attention", "pyarrow")
        if len({machine.get(name) for machine in machines}) > 1
    ]
    names = sorted({f"{machine['processor']} ({machine['instructions']})" for machine in machines})
    what = "processors with different instruction sets" if "features" in differ else "unlike versions"
    return f"warning: shards come from {what} ({'; '.join(names)}): another run may give other bytes"
