"""Many texts in files: shards over processes, a manifest, and a job that can be killed and run again.

A shard is (first index, count). Workers return its bytes; the driver alone writes files. A file gets its
name after it is on the disk, and the manifest is replaced after that, so at every moment the manifest lists
whole files only. What it does not list is written again: a shard's bytes do not depend on who writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, Protocol

import torch

from generation.shards import Scribe, Settings, Shard, Stop, Task

MANIFEST, LOCK = "manifest.json", "lock"
UNFINISHED = ".unfinished"  # the suffix of a file that has not its name yet
VERSION = 1  # of the manifest
ATTEMPTS = 3  # of a shard, before the job leaves it out
SHARD_SIZE = 1024


class BulkError(ValueError):
    """A job that cannot begin or go on; the message says why."""


@dataclass(frozen=True)
class Loss:
    """A shard that was not written. died: the worker was lost too."""

    reason: str
    died: bool = True


class Pool(Protocol):
    """Workers that write shards. A worker that dies is replaced."""

    workers: int
    idle: int  # tasks that it can take now

    def give(self, task: Task) -> None:
        """Let a worker write a task."""

    def wait(self) -> list[tuple[Task, Shard | Loss]]:
        """Wait until a task has ended, or a worker may take one; return the tasks that have ended."""

    def close(self) -> None:
        """End all workers at once."""


@dataclass
class Job:
    """A request for many texts. texts: their number; of a prompts file, its lines.

    resolved: the fields of the settings that were 'auto', as shards.resolved() gives them. A directory keeps
    those with which it was begun.
    Raises BulkError for what is wrong with it.
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
        """What decides the bytes of all files, as JSON. The model's name does not."""
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
        """`count` lines from `first`, which begins a shard."""
        with open(self.path, "rb") as file:
            file.seek(self._begins[first])
            return [file.readline() for _ in range(count)]


@dataclass
class Progress:
    """How far a job is. done (texts), tokens, seconds: of this run; texts: of all runs."""

    total: int
    texts: int = 0
    done: int = 0
    tokens: int = 0
    lost: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since this run began."""
        return time.monotonic() - self.began


class Manifest:
    """The record of a job in its directory, which is written in whole at each change.

    Raises BulkError if the directory holds another request, or a manifest that cannot be read.
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
        """The shards that are complete, by the file's name."""
        return self.content["shards"]

    @property
    def texts(self) -> int:
        """Texts of the complete shards; lines that were rejected and empty ones count too."""
        return sum(shard["count"] for shard in self.shards.values())

    def check_files(self) -> list[str]:
        """Remove from the record the shards whose file is missing or has changed; return their names."""
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
        """Record a shard whose file is written."""
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
        """Replace the file. lazily: not if most of the time would go into writing it."""
        start = time.monotonic()
        if lazily and start - self._saved_at < 20 * self._save_seconds:
            return
        self.content["shards"] = dict(sorted(self.shards.items()))
        write_file(self.path, (json.dumps(self.content, indent=1) + "\n").encode())
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - start


def hash_of(content: dict) -> str:
    """The SHA-256 of JSON, whatever the order of its names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a file that exists either as a whole, on the disk, or not at all.

    Raises OSError; its filename is then the path, and nothing is left.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with open(unfinished, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # a rename is on the disk when its directory is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which ends with the process. Raises BulkError if another has it."""
    import fcntl

    with open(directory / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BulkError(f"another process writes texts to {directory}") from None
        yield


def file_of(task: Task, settings: Settings) -> str:
    """The name of a shard's file."""
    return f"texts-{task.first:012d}.{settings.format}"


def run(
    job: Job,
    directory: Path,
    open_pool: Callable[[Settings, int], Pool],
    notice: Callable[[str], object] = lambda line: None,
    progress: Callable[[Progress], object] = lambda progress: None,
) -> Manifest:
    """Write what is missing of a job, and return its manifest; 'complete' there says whether all is written.

    open_pool: opens workers for settings and the number of shards. notice: takes lines for people.
    Raises BulkError, and OSError if the directory cannot be written. However this ends, the directory holds
    whole files only, and calling it again goes on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        manifest = Manifest(directory, job)
        for left in directory.glob(f"*{UNFINISHED}"):  # of a killed run
            left.unlink()
        if bad := manifest.check_files():
            notice(f"{len(bad)} files are missing or changed, the first is {bad[0]}; they are written again")
        settings = replace(job.settings, **manifest.content["resolved"])
        missing = deque(task for task in job.tasks() if file_of(task, settings) not in manifest.shards)
        manifest.content["complete"] = not missing
        manifest.save()
        if missing:
            pool = open_pool(settings, len(missing))
            try:
                _write_all(job, settings, manifest, missing, pool, notice, progress)
            except BaseException:
                with contextlib.suppress(OSError):  # the disk may be full, which is then being raised
                    manifest.save()
                raise
            finally:
                pool.close()
            manifest.save()
        return manifest


def _write_all(
    job: Job,
    settings: Settings,
    manifest: Manifest,
    missing: deque[Task],
    pool: Pool,
    notice: Callable[[str], object],
    progress: Callable[[Progress], object],
) -> None:
    """Let the pool write the missing shards; record each, and each worker that is lost."""
    state = Progress(job.texts, manifest.texts)
    attempts: dict[int, int] = {}
    given = in_a_row = 0
    mixed = False  # reported
    progress(state)
    while missing or given:
        while missing and pool.idle:
            pool.give(job.with_lines(missing.popleft()))
            given += 1
        for task, outcome in pool.wait():
            given -= 1
            name = file_of(task, settings)
            attempts[task.first] = attempts.get(task.first, 0) + 1
            if isinstance(outcome, Loss):
                in_a_row += 1
                if outcome.died:
                    state.lost += 1
                    manifest.content["workers_lost"].append({"shard": name, "reason": outcome.reason})
                if attempts[task.first] < ATTEMPTS:
                    missing.append(Task(task.first, task.count))
                else:
                    what = {"attempts": attempts[task.first], "error": outcome.reason}
                    manifest.content["failed"][name] = what
                    notice(f"{name} was left out after {ATTEMPTS} attempts: {outcome.reason}")
                if in_a_row >= ATTEMPTS + 2 * pool.workers:
                    raise BulkError(f"no worker wrote anything in {in_a_row} attempts: {outcome.reason}")
            else:
                in_a_row = 0
                write_file(manifest.path.parent / name, outcome.data)
                manifest.add(name, task, outcome, attempts[task.first])
                for line, error in outcome.rejected:
                    notice(f"{job.prompts.path if job.prompts else ''}:{line}: {error}")
                state.texts += task.count
                state.done += task.count
                state.tokens += outcome.tokens
            if not mixed and len(manifest.content["machines"]) > 1:
                mixed = True
                notice(mix_of(manifest.content["machines"].values()))
            progress(state)
        manifest.content["complete"] = not (missing or given or manifest.content["failed"])
        manifest.save(lazily=True)


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


@dataclass
class _Worker:
    """A process, the driver's end of its pipe, and the task that it has."""

    process: Any
    pipe: connection.Connection
    task: Task | None = None


class LocalPool:
    """Processes of this machine, each with one thread and its own engine."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self.settings, self.workers = settings, workers
        self._context = multiprocessing.get_context("spawn")
        self._all = [self._start() for _ in range(workers)]

    @property
    def idle(self) -> int:
        return sum(worker.task is None for worker in self._all)

    @property
    def processes(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._all]

    def give(self, task: Task) -> None:
        worker = next(worker for worker in self._all if worker.task is None)
        worker.task = task
        with contextlib.suppress(OSError):  # it has died, which wait() finds
            worker.pipe.send(task)

    def wait(self) -> list[tuple[Task, Shard | Loss]]:
        busy = {worker.pipe: worker for worker in self._all if worker.task}
        ended: list[tuple[Task, Shard | Loss]] = []
        for pipe in connection.wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.task
            try:
                outcome = worker.pipe.recv()
            except (EOFError, OSError):
                outcome = Loss(self._bury(worker))
                self._all[self._all.index(worker)] = self._start()
            ended.append((worker.task, outcome))
            worker.task = None
        return ended

    def close(self) -> None:
        for worker in self._all:
            worker.process.kill()  # it holds nothing that the driver has not
        for worker in self._all:
            worker.process.join()
            worker.pipe.close()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        # Ctrl-C reaches all processes of a terminal, and the driver alone answers it.
        resource_tracker.ensure_running()  # its start would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = self._context.Process(target=work, args=(self.settings, theirs), daemon=True)
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(process, ours)

    def _bury(self, worker: _Worker) -> str:
        """Close what a dead worker leaves; return how it died."""
        worker.pipe.close()
        worker.process.join()
        code = worker.process.exitcode
        if code < 0:
            return f"worker {worker.process.pid} was killed by {signal.Signals(-code).name}"
        return f"worker {worker.process.pid} ended with exit code {code}"


def work(settings: Settings, pipe: connection.Connection) -> None:
    """A worker: write the tasks that arrive, until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    scribe = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            scribe = scribe or Scribe(settings)
            outcome: Shard | Loss = scribe.write(task, wanted=lambda: not pipe.poll())
        except Stop:
            return
        except Exception as error:
            outcome = Loss(f"{type(error).__name__}: {error}", died=False)
        try:
            pipe.send(outcome)
        except OSError:
            return
