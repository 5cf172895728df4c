"""Shards over a Ray cluster: the Pool of generation.bulk, made of Ray actors.

Ray starts the actors, places them on nodes, moves tasks and bytes, and reports deaths. Nodes need the same
version of this package, and the model under the same name. They need no shared disk: only the driver writes
files.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from typing import Any

import torch

from generation.jobs import BulkError
from generation.processes import STALL_SECONDS, TICK, Patience
from generation.shards import Loss, Scribe, Settings, Shard, Task

MOST_FAILED_STARTS = 20  # in a row
MOST_ASK_SECONDS = 10.0  # longest time between two questions whether an actor still writes


class Actor:
    """A worker: one thread writes, with an engine that the first task opens; another thread answers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scribe: Scribe | None = None
        self.signs = 0

    def ready(self) -> None:
        """Return when the actor has a node."""

    def alive(self) -> int:
        """A number that grows while the actor writes."""
        return self.signs

    def write(self, task: Task) -> Shard:
        """Write a task and return its shard."""
        torch.set_num_threads(1)  # holds for the calling thread
        self.scribe = self.scribe or Scribe(self.settings)
        return self.scribe.write(task, self._wanted)

    def _wanted(self) -> bool:
        self.signs += 1
        return True


def open_pool(
    address: str, workers: int | None, settings: Settings, shards: int, timeout: float = STALL_SECONDS
) -> RayPool:
    """The actors on the cluster at an address: `workers`, or one for each CPU; at most one for each shard.

    timeout: seconds without progress after which an actor is killed.
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
    return RayPool(ray, settings, max(1, min(workers or cpus, shards)), ours, timeout)


class RayPool:
    """Actors of one CPU each. An actor gets a task when it has a node, so no task waits for a lost node.

    ray: the module, initialised. ours: disconnect from the cluster at the end. timeout: seconds.
    """

    def __init__(
        self,
        ray: Any,
        settings: Settings,
        workers: int,
        ours: bool = False,
        timeout: float = STALL_SECONDS,
    ) -> None:
        self._ray, self._ours, self.workers = ray, ours, workers
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2}
        self._kind = ray.remote(**options)(Actor)
        self._settings = ray.put(settings)
        self._failed_starts = 0
        self._free: deque[Any] = deque()
        self._starting: dict[Any, Any] = {}  # reference to the result of ready() -> the actor
        self._busy: dict[Any, tuple[Task, Any]] = {}  # reference to that of write() -> (task, actor)
        self._asked: dict[Any, Any] = {}  # reference to that of alive() -> reference to that of write()
        self._signs: dict[Any, int] = {}  # reference to that of write() -> the last answer
        self._ask_seconds, self._asked_at = min(MOST_ASK_SECONDS, timeout / 4), time.monotonic()
        self._patience = Patience(timeout)
        for _ in range(workers):
            self._start()

    @property
    def idle(self) -> int:
        return len(self._free)

    def give(self, task: Task) -> None:
        actor = self._free.popleft()
        reference = actor.write.remote(task)
        self._busy[reference] = task, actor
        self._patience.heard(reference)

    def wait(self) -> list[tuple[Task, Shard | Loss]]:
        while True:
            pending = [*self._starting, *self._busy, *self._asked]
            ready, _ = self._ray.wait(pending, num_returns=1, timeout=TICK)
            ended: list[tuple[Task, Shard | Loss]] = []
            for reference in ready:
                result = self._result(reference)
                if reference in self._asked:
                    self._answered(self._asked.pop(reference), result)
                elif reference in self._starting:
                    self._started(reference, result)
                else:
                    ended.append(self._ended(reference, result))
            for reference in self._patience.exhausted():
                ended.append(self._ended(reference, self._patience.loss("an actor")))
            if ended or (ready and self._free):
                return ended
            self._ask()

    def _result(self, reference: Any) -> Any:
        """The result of an actor's call, or a Loss."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:  # raised by our code
            cause = error.cause or error
            return Loss(f"{type(cause).__name__}: {cause}", died=False)
        except errors.RayError as error:
            return Loss(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    def _started(self, reference: Any, result: Loss | None) -> None:
        """Handle that an actor has a node, or was lost before."""
        actor = self._starting.pop(reference)
        if not isinstance(result, Loss):
            self._failed_starts = 0
            self._free.append(actor)
            return
        self._failed_starts += 1
        if self._failed_starts > MOST_FAILED_STARTS:
            raise BulkError(f"Ray starts no actor: {result.reason}")
        self._replace(actor)

    def _ended(self, reference: Any, result: Shard | Loss) -> tuple[Task, Shard | Loss]:
        """The task of an actor with its shard or loss."""
        task, actor = self._busy.pop(reference)
        self._patience.forget(reference)
        self._signs.pop(reference, None)
        if isinstance(result, Loss) and result.died:
            self._replace(actor)
        else:
            self._free.append(actor)
        return task, result

    def _ask(self) -> None:
        """Ask the busy actors that have answered the last question, from time to time."""
        now = time.monotonic()
        if now - self._asked_at < self._ask_seconds:
            return
        self._asked_at = now
        waiting = set(self._asked.values())
        for reference, (_, actor) in self._busy.items():
            if reference not in waiting:
                self._asked[actor.alive.remote()] = reference

    def _answered(self, reference: Any, signs: int | Loss) -> None:
        """Handle an actor's answer on its progress."""
        if reference in self._busy and not isinstance(signs, Loss):
            if signs != self._signs.get(reference):
                self._patience.heard(reference)
            self._signs[reference] = signs

    def close(self) -> None:
        actors = [*self._free, *self._starting.values(), *(actor for _, actor in self._busy.values())]
        for actor in actors:
            self._end(actor)
        if self._ours:
            self._ray.shutdown()

    def _end(self, actor: Any) -> None:
        with contextlib.suppress(Exception):  # the actor or the cluster may be gone
            self._ray.kill(actor)

    def _replace(self, actor: Any) -> None:
        self._end(actor)  # if only the bytes were lost, the actor is still alive
        self._start()

    def _start(self) -> None:
        actor = self._kind.remote(self._settings)
        self._starting[actor.ready.remote()] = actor
