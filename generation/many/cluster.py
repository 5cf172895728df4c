"""Shards over a Ray cluster: a Pool whose workers are Ray actors.

Nodes need this version of the package and the model's name, but no shared disk: only the driver writes files.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from shakespeare.attention_ext.build import prebuilt
from shakespeare.generation.many import STALL_SECONDS
from shakespeare.generation.many.jobs import BulkError
from shakespeare.generation.many.processes import ALIVE, Pool, Worker
from shakespeare.generation.many.shards import Loss, Scribe, Settings, Shard, Task

MOST_ASK_SECONDS = 10.0  # longest time between two questions whether an actor still writes


class Actor:
    """A worker: one thread writes, with an engine that the first task opens; another thread answers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scribe: Scribe | None = None
        self.signs = 0

    def alive(self) -> int:
        """A number that grows while the actor writes; it answers when the actor has a node."""
        return self.signs

    def write(self, task: Task) -> Shard:
        """Write a task and return its shard."""
        self.scribe = self.scribe or Scribe(self.settings)
        return self.scribe.write(task, self._wanted)

    def _wanted(self) -> bool:
        self.signs += 1
        return True


def open_pool(
    address: str, workers: int | None, settings: Settings, shards: int, timeout: float = STALL_SECONDS
) -> Pool:
    """Actors on the cluster at an address: `workers`, or one for each CPU; at most one for each shard.

    timeout: seconds without progress until an actor is killed. Raises BulkError without Ray or a cluster.
    """
    try:
        import ray
    except ImportError:
        raise BulkError("--ray needs Ray; install it (pip install -e '.[cluster]')") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            with warnings.catch_warnings(action="ignore"):
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BulkError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    passed = {name: os.environ[name] for name in (prebuilt.COMPILE,) if name in os.environ}
    limits = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2}
    remote = ray.remote(**limits, runtime_env={"env_vars": passed} if passed else None)(Actor)
    shared = ray.put(settings)
    ask_seconds = min(MOST_ASK_SECONDS, timeout / 4)
    count = max(1, min(workers or int(ray.cluster_resources().get("CPU", 0)), shards))
    closed = ray.shutdown if ours else lambda: None
    return Pool(lambda: RayWorker(ray, remote.remote(shared), ask_seconds), count, timeout, closed)


class RayWorker(Worker):
    """An actor of one CPU. It takes tasks once it has a node, so no task waits for a lost node.

    ray: the module, initialised. ask_seconds: time between two questions whether the actor still writes.
    """

    name = "an actor"

    def __init__(self, ray: Any, actor: Any, ask_seconds: float) -> None:
        super().__init__()
        self._ray = ray
        self._actor = actor
        self._ask_seconds = ask_seconds
        self._death = "the actor was lost"

    def start(self) -> None:
        self._get(self._actor.alive.remote())

    def write(self, task: Task) -> Iterator[Any]:
        writing = self._actor.write.remote(task)
        before = None
        while not self._ray.wait([writing], timeout=self._ask_seconds)[0]:
            signs = self._get(self._actor.alive.remote())
            if signs != before:
                yield ALIVE
            before = signs
        yield self._get(writing)

    def end(self) -> None:
        with contextlib.suppress(Exception):  # the actor or the cluster may be gone
            self._ray.kill(self._actor)

    def death(self) -> str:
        return self._death

    def _get(self, reference: Any) -> Any:
        """The result of an actor's call, or a Loss if our code failed in it."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause or error
            return Loss(f"{type(cause).__name__}: {cause}", died=False)
        except errors.RayError as error:  # also if only the bytes were lost
            self._death = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise EOFError from None
