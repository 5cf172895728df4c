"""Shards over a Ray cluster: the Pool of generation.bulk, made of Ray actors.

Ray starts the actors, places them on nodes, moves tasks and bytes, and reports deaths. Nodes need this
package, under the same version, and the model under the same name; they need not share a disk, as the driver
alone writes files.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from typing import Any

import torch

from generation.bulk import BulkError, Loss
from generation.shards import Scribe, Settings, Shard, Task

MOST_FAILED_STARTS = 20  # in a row


class Actor:
    """A worker: one thread and its own engine, opened with the first task."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.settings = settings
        self.scribe: Scribe | None = None

    def ready(self) -> None:
        """Return when the actor has a node."""

    def write(self, task: Task) -> Shard:
        """The shard of a task."""
        self.scribe = self.scribe or Scribe(self.settings)
        return self.scribe.write(task)


def open_pool(address: str, workers: int | None, settings: Settings, shards: int) -> RayPool:
    """The actors on the cluster at an address: `workers` or as many as it has CPUs, one a shard at most.

    Raises BulkError if Ray is not installed or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise BulkError("--ray needs Ray; install it (pip install -e '.[cluster]')") from None
    ours = not ray.is_initialized()
    if ours:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BulkError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    cpus = int(ray.cluster_resources().get("CPU", 0))
    return RayPool(ray, settings, max(1, min(workers or cpus, shards)), ours)


class RayPool:
    """Actors of one CPU each. An actor takes a task once it has a node, so none waits for a lost node.

    ray: the module, initialised. ours: disconnect from the cluster at the end.
    """

    def __init__(self, ray: Any, settings: Settings, workers: int, ours: bool = False) -> None:
        self._ray, self._ours, self.workers = ray, ours, workers
        self._kind = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Actor)
        self._settings = ray.put(settings)
        self._failed_starts = 0
        self._free: deque[Any] = deque()
        self._starting: dict[Any, Any] = {}  # what actor.ready() will return, and the actor
        self._busy: dict[Any, tuple[Task, Any]] = {}
        for _ in range(workers):
            self._start()

    @property
    def idle(self) -> int:
        return len(self._free)

    def give(self, task: Task) -> None:
        actor = self._free.popleft()
        self._busy[actor.write.remote(task)] = task, actor

    def wait(self) -> list[tuple[Task, Shard | Loss]]:
        errors = self._ray.exceptions
        ready, _ = self._ray.wait([*self._starting, *self._busy], num_returns=1)
        ended: list[tuple[Task, Shard | Loss]] = []
        for reference in ready:
            try:
                result = self._ray.get(reference)
            except errors.RayTaskError as error:  # raised by our code
                cause = error.cause or error
                result = Loss(f"{type(cause).__name__}: {cause}", died=False)
            except errors.RayError as error:
                result = Loss(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            died = isinstance(result, Loss) and result.died
            if reference in self._starting:
                actor = self._starting.pop(reference)
                self._failed_starts = self._failed_starts + 1 if died else 0
                if self._failed_starts > MOST_FAILED_STARTS:
                    raise BulkError(f"Ray starts no actor: {result.reason}")
            else:
                task, actor = self._busy.pop(reference)
                ended.append((task, result))
            if died:
                self._end(actor)  # it may live on, where the bytes alone were lost
                self._start()
            else:
                self._free.append(actor)
        return ended

    def close(self) -> None:
        actors = [*self._free, *self._starting.values(), *(actor for _, actor in self._busy.values())]
        for actor in actors:
            self._end(actor)
        if self._ours:
            self._ray.shutdown()

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # it, or the cluster, may be gone
            self._ray.kill(actor)

    def _start(self) -> None:
        actor = self._kind.remote(self._settings)
        self._starting[actor.ready.remote()] = actor
