"""Many texts in files: shards over workers, a manifest, and a job that can be killed and run again.

A shard is (first index, count). A worker writes its file, which gets its name when it is complete; then the
driver lists it in the manifest. Shards that are not listed are written again, with the same bytes.
"""

import contextlib
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

from shakespeare.generation.many import SHARD_SECONDS
from shakespeare.generation.many.jobs import MANIFEST, BulkError, Job, Manifest, file_of, seed_for
from shakespeare.generation.many.shards import Task
from shakespeare.generation.many.stores import open_store
from shakespeare.generation.many.workers import Order, Worker
from shakespeare.generation.sampling import RANDOM
from shakespeare.model.files import UNFINISHED

ATTEMPTS = 3  # attempts at a shard before the job leaves it out
TICK = 1.0  # seconds between two looks at the workers' time
LEFT = re.compile(rf"(texts-.*|{MANIFEST})\.[0-9a-f]{{8}}{UNFINISHED}")
log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of a job. texts counts all runs; tokens, texts by device, and seconds count this one."""

    total: int
    texts: int
    tokens: int = 0
    lost: int = 0
    devices: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self.began


def run(
    job: Job,
    out: str,
    open_workers: Callable[[Order, int], list[Worker]],
    progress: Callable[[Progress], object] = lambda progress: None,
    timeout: float = SHARD_SECONDS,
    verify: bool = False,
) -> Manifest:
    """Write the missing shards of a job; return its manifest. 'complete' there says whether all are written.

    A job's seed of -1 becomes a random one, which the manifest records. What the user should know is logged.
    out: a folder's name, or a URL of fsspec. open_workers: makes workers for an order, at most one for each
    of this number of shards. timeout: seconds that a worker may take for a shard. verify: hash the files that
    are listed. After any end only complete files have their names, and another call continues. Raises
    BulkError, ValueError if another process writes there, and OSError if the files cannot be written.
    """
    store = open_store(out)
    with store.locked():
        if job.settings.seed == RANDOM:
            job = replace(job, settings=replace(job.settings, seed=seed_for(store)))
        manifest = Manifest(store, out, job)
        bad = manifest.check_files(verify)
        if bad:
            log.warning(
                f"{len(bad)} files are missing or changed, the first is {bad[0]}; they are written again"
            )
        settings = replace(job.settings, **manifest.content["resolved"])
        missing = deque(task for task in job.tasks() if file_of(task, settings) not in manifest.shards)
        manifest.content["complete"] = not missing
        manifest.save()
        if missing:
            workers = open_workers(Order(settings, min(job.shard_size, job.texts), out), len(missing))
            try:
                _write_all(job, manifest, missing, workers, progress, timeout)
            except BaseException:
                with contextlib.suppress(OSError):  # the disk may be full; that error is being raised already
                    manifest.save()
                raise
            finally:
                for worker in workers:
                    worker.end()
            manifest.content["complete"] = not manifest.content["failed"]
            manifest.save()
        for name in filter(LEFT.fullmatch, store.files()):  # of killed processes
            store.remove(name)
        return manifest


def _write_all(
    job: Job,
    manifest: Manifest,
    missing: deque[Task],
    workers: list[Worker],
    progress: Callable[[Progress], object],
    timeout: float,
) -> None:
    """Let the workers write the missing shards. Record each shard and each lost worker."""
    state = Progress(job.texts, manifest.texts)
    attempts: Counter[str] = Counter()
    in_a_row = 0
    turns: dict[Future, tuple[Worker, Task | None, float]] = {}

    def start(worker: Worker, task: Task | None) -> None:
        turns[worker.start(task and job.with_lines(task))] = worker, task, time.monotonic()

    for worker in workers:
        start(worker, None)
    idle: list[Worker] = []
    progress(state)
    while missing or any(task for _, task, _ in turns.values()):
        for future in wait(turns, TICK, FIRST_COMPLETED).done:
            worker, task, began = turns.pop(future)
            death = future.exception()
            outcome = death or future.result()
            if isinstance(outcome, OSError):  # of the disk or the store: the others would fail too
                raise outcome
            if task and isinstance(outcome, dict):
                in_a_row = 0
                manifest.add(file_of(task, job.settings), outcome)
                state.texts += outcome["count"]
                state.tokens += outcome["tokens"]
                state.devices[outcome["device"]] += outcome["count"]
            elif outcome:
                in_a_row += 1
                reason = f"{type(outcome).__name__}: {outcome}".partition("\n")[0]
                if task:
                    name = file_of(task, job.settings)
                    attempts[name] += 1
                    if death and time.monotonic() - began > timeout:
                        reason = f"a worker took more than {timeout:g} s for {name} and was killed"
                        log.warning(reason)
                    if death:
                        state.lost += 1
                        manifest.content["workers_lost"].append({"shard": name, "reason": reason})
                    if attempts[name] < ATTEMPTS:
                        missing.append(task)
                    else:
                        manifest.content["failed"][name] = {"attempts": ATTEMPTS, "error": reason}
                        log.warning(f"{name} was left out after {ATTEMPTS} attempts: {reason}")
                if in_a_row >= ATTEMPTS + 2 * len(workers):
                    raise BulkError(f"no worker wrote anything in {in_a_row} attempts: {reason}")
            if death or outcome and not task:
                start(worker, None)
            else:
                idle.append(worker)
            progress(state)
        while missing and idle:
            start(idle.pop(), missing.popleft())
        for worker, task, began in turns.values():
            if task and time.monotonic() - began > timeout:
                worker.end()
        manifest.save(lazily=True)
