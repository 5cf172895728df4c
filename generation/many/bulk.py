"""Many texts in files: shards over processes, a manifest, and a job that can be killed and run again.

A shard is (first index, count). Workers return its bytes; only the driver writes files. A file is renamed
when it is on the disk, then the manifest lists it. Other shards are written again, with the same bytes.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shakespeare.generation.many.jobs import MANIFEST, BulkError, Job, Manifest, file_of, mix_of, seed_for
from shakespeare.generation.many.processes import Pool
from shakespeare.generation.many.shards import Loss, Settings, Task
from shakespeare.generation.sampling import RANDOM
from shakespeare.model.files import locked, remove_unfinished, write_file

LOCK = ".texts.lock"
ATTEMPTS = 3  # attempts at a shard before the job leaves it out


@dataclass
class Progress:
    """The progress of a job. done (texts), tokens and seconds count this run; texts counts all runs."""

    total: int
    texts: int = 0
    done: int = 0
    tokens: int = 0
    lost: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self.began


def run(
    job: Job,
    directory: Path,
    open_pool: Callable[[Settings, int], Pool],
    notice: Callable[[str], object] = lambda line: None,
    progress: Callable[[Progress], object] = lambda progress: None,
) -> Manifest:
    """Write the missing shards of a job; return its manifest. 'complete' there says whether all are written.

    A job's seed of -1 becomes a random one, which the manifest records.
    open_pool: opens workers for settings and the number of shards. notice: takes lines for the user. After
    any end the directory holds only complete files, and another call continues. Raises BulkError, ValueError
    if another process writes there, and OSError if the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / LOCK, "writes texts"):
        if job.settings.seed == RANDOM:
            job = replace(job, settings=replace(job.settings, seed=seed_for(directory)))
        manifest = Manifest(directory, job)
        remove_unfinished(directory, "texts-*", MANIFEST)
        bad = manifest.check_files()
        if bad:
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
                with contextlib.suppress(OSError):  # the disk may be full; that error is being raised already
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
    """Let the pool write the missing shards. Record each shard and each lost worker."""
    state = Progress(job.texts, manifest.texts)
    attempts: dict[int, int] = {}
    running = 0
    in_a_row = 0
    progress(state)
    while missing or running:
        while missing and pool.idle:
            pool.give(job.with_lines(missing.popleft()))
            running += 1
        for task, outcome in pool.wait():
            running -= 1
            name = file_of(task, settings)
            attempts[task.first] = attempts.get(task.first, 0) + 1
            if isinstance(outcome, Loss):
                in_a_row += 1
                if outcome.died:
                    state.lost += 1
                    manifest.content["workers_lost"].append({"shard": name, "reason": outcome.reason})
                if outcome.stalled:
                    notice(f"{outcome.reason}; it had {name}")
                if attempts[task.first] < ATTEMPTS:
                    missing.append(Task(task.first, task.count))
                else:
                    manifest.content["failed"][name] = {"attempts": ATTEMPTS, "error": outcome.reason}
                    notice(f"{name} was left out after {ATTEMPTS} attempts: {outcome.reason}")
                if in_a_row >= ATTEMPTS + 2 * pool.workers:
                    raise BulkError(f"no worker wrote anything in {in_a_row} attempts: {outcome.reason}")
            else:
                in_a_row = 0
                write_file(manifest.path.parent / name, outcome.data)
                if manifest.add(name, task, outcome, attempts[task.first]):
                    notice(mix_of(manifest.content["machines"].values()))
                for line, error in outcome.rejected:
                    notice(f"{job.prompts.path if job.prompts else ''}:{line}: {error}")
                state.texts += task.count
                state.done += task.count
                state.tokens += outcome.tokens
            progress(state)
        manifest.content["complete"] = not (missing or running or manifest.content["failed"])
        manifest.save(lazily=True)
