"""Many texts in files: shards over workers, a manifest, and a job that can be killed and run again.

A worker writes a shard's file, which gets its name when it is complete; then the driver lists it in the
manifest. Shards that are not listed are written again, with the same bytes.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shakespeare.generation.many import SHARD_SECONDS
from shakespeare.generation.many.jobs import BulkError, Job, Manifest
from shakespeare.generation.many.shards import Task
from shakespeare.generation.many.stores import open_store
from shakespeare.generation.many.workers import Order, Worker

ATTEMPTS = 3  # attempts at a shard before the job leaves it out
TICK = 1.0  # seconds between two looks at whether the manifest has changed
log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of a job. texts counts all runs; tokens and texts by device count this one.

    began: the time of this run's beginning, as time.monotonic() gives it.
    """

    texts: int
    tokens: int = 0
    lost: int = 0
    devices: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)


def run(
    job: Job,
    out: str,
    open_workers: Callable[[Order, int], list[Worker]],
    progress: Callable[[Progress], object] = lambda progress: None,
    timeout: float = SHARD_SECONDS,
    verify: bool = False,
) -> Manifest:
    """Write the missing shards of a job; return its manifest. 'complete' there says whether all are written.

    What the user should know is logged. out: a folder's name, or a URL of fsspec. open_workers: makes workers
    for an order, at most one for each of this number of shards. timeout: seconds that a worker may take to
    start, and for a shard. verify: hash the files that are listed. After any end only complete files have
    their names, and another call continues. Raises BulkError, ValueError if another process writes there, and
    OSError if the files cannot be written.
    """
    store = open_store(out)
    with store.locked():
        manifest = Manifest(store, out, job, verify)
        manifest.save()
        missing = [task for name, task in job.tasks.items() if name not in manifest.shards]
        if missing:
            most = min(job.shard_size, job.texts)
            workers = open_workers(Order(manifest.settings, most, out), len(missing))
            try:
                asyncio.run(_write_all(manifest, missing, workers, progress, timeout))
            finally:
                for worker in workers:
                    worker.end()
                manifest.save()
        return manifest


async def _write_all(
    manifest: Manifest,
    missing: list[Task],
    workers: list[Worker],
    progress: Callable[[Progress], object],
    timeout: float,
) -> None:
    """Let the workers write the missing shards. Record each shard and each failure."""
    job = manifest.job
    state = Progress(job.texts - sum(task.count for task in missing))
    attempts: Counter[str] = Counter()
    in_a_row = 0
    queue: asyncio.Queue[Task] = asyncio.Queue()
    for task in missing:
        queue.put_nowait(task)

    async def serve(worker: Worker) -> None:
        nonlocal in_a_row
        begun = False
        while True:
            task = await queue.get() if begun else None
            given = task if task is None or isinstance(job.prompt, str) else job.prompt.of(task)
            try:
                record = await _turn(worker, given, timeout)
            except OSError:  # of the disk or the store: the others would fail too
                raise
            except Exception as error:
                begun = False
                in_a_row += 1
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if task:
                    state.lost += 1
                    manifest.content["workers_lost"].append({"shard": task.name, "reason": reason})
                    attempts[task.name] += 1
                    if attempts[task.name] < ATTEMPTS:
                        queue.put_nowait(task)
                    else:
                        manifest.content["failed"][task.name] = reason
                        log.warning(f"{task.name} was left out after {ATTEMPTS} attempts: {reason}")
                if in_a_row >= ATTEMPTS + 2 * len(workers):
                    raise BulkError(f"no worker wrote anything in {in_a_row} attempts: {reason}") from None
            else:
                begun = True
                if task:
                    in_a_row = 0
                    manifest.add(task.name, record)
                    state.texts += task.count
                    state.tokens += record["tokens"]
                    state.devices[record["device"]] += task.count
            if task:
                queue.task_done()
            progress(state)

    async def save() -> None:
        while True:
            start = time.monotonic()
            manifest.save()
            await asyncio.sleep(TICK + 20 * (time.monotonic() - start))  # a large one takes seconds

    progress(state)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(each) for each in (save(), *map(serve, workers))]
            await queue.join()
            for each in running:
                each.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _turn(worker: Worker, task: Task | None, timeout: float) -> Any:
    """What work() gives in a worker. Raises its error, or that of the worker's death."""
    try:
        async with asyncio.timeout(timeout):
            outcome = await asyncio.wrap_future(worker.start(task))
    except TimeoutError:
        worker.end()
        name = task.name if task else "its start"
        reason = f"a worker took more than {timeout:g} s for {name} and was killed"
        log.warning(reason)
        raise BulkError(reason) from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
