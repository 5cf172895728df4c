"""Workers on this machine, one process each. A worker that dies or stalls is replaced."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from typing import Any

import torch

from generation.shards import Loss, Scribe, Settings, Shard, Stop, Task

ALIVE, GONE = "alive", "gone"  # a worker's message while it writes; the message for one that died
TICK = 0.5  # seconds between two checks of the workers' silence
# A writing worker sends a message five times a second. It is silent while it starts and opens the model, two
# to five seconds on an idle core; the rest is for busy machines.
STALL_SECONDS = 120.0


class Patience:
    """How long each worker with a task has been silent.

    Only time in which the driver runs counts: Ctrl-Z stops the workers too.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._silent: dict[Any, float] = {}
        self._looked = time.monotonic()

    def heard(self, worker: Any) -> None:
        """Note that a worker got a task or sent a message."""
        self._silent[worker] = 0.0

    def forget(self, worker: Any) -> None:
        """Note that a worker has no task any more."""
        self._silent.pop(worker, None)

    def exhausted(self) -> list[Any]:
        """The workers that were silent for more than `timeout` seconds. Call it at least every TICK."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * TICK), now
        for worker in self._silent:
            self._silent[worker] += passed
        return [worker for worker, seconds in self._silent.items() if seconds > self.timeout]

    def loss(self, name: str) -> Loss:
        """The loss of the shard of such a worker."""
        return Loss(f"{name} gave no sign of life for {self.timeout:g} s and was killed", stalled=True)


@dataclass(eq=False)
class _Worker:
    """A process, the driver's end of its pipe, and its task.

    A thread of the driver talks with it, because a process that stops within a message blocks its reader.
    """

    process: Any
    pipe: connection.Connection
    task: Task | None = None
    loss: Loss | None = None
    tasks: queue.SimpleQueue[Task | None] = field(default_factory=queue.SimpleQueue)

    def converse(self, said: queue.SimpleQueue[tuple[_Worker, Any]]) -> None:
        """Pass on tasks and put the process's messages into `said`, until it is gone or a task is None."""
        try:
            while (task := self.tasks.get()) is not None:
                self.pipe.send(task)
                while (word := self.pipe.recv()) == ALIVE:
                    said.put((self, ALIVE))
                said.put((self, word))
        except (EOFError, OSError):
            said.put((self, GONE))


class LocalPool:
    """Processes of this machine, each with one thread and its own engine.

    timeout: seconds of silence after which a worker is killed.
    """

    def __init__(self, settings: Settings, workers: int, timeout: float = STALL_SECONDS) -> None:
        self.settings, self.workers = settings, workers
        self._context = multiprocessing.get_context("spawn")
        self._said: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()
        self._patience = Patience(timeout)
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
        self._patience.heard(worker)
        worker.tasks.put(task)

    def wait(self) -> list[tuple[Task, Shard | Loss]]:
        while True:
            with contextlib.suppress(queue.Empty):
                worker, word = self._said.get(timeout=TICK)
                if word != ALIVE:
                    return [self._ended(worker, word)]
                self._patience.heard(worker)
            for silent in self._patience.exhausted():
                self._patience.forget(silent)
                silent.loss = self._patience.loss(f"worker {silent.process.pid}")
                silent.process.kill()  # its thread notices

    def _ended(self, worker: _Worker, word: Any) -> tuple[Task, Shard | Loss]:
        """The task of a worker with its shard or loss."""
        assert worker.task
        task, outcome = worker.task, word
        self._patience.forget(worker)
        if word == GONE:
            outcome = self._bury(worker)
            self._all[self._all.index(worker)] = self._start()
        worker.task = None
        return task, outcome

    def close(self) -> None:
        for worker in self._all:
            worker.process.kill()  # it holds nothing that the driver lacks
            worker.tasks.put(None)
        for worker in self._all:
            worker.process.join()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        # Ctrl-C reaches all processes of a terminal; only the driver handles it.
        resource_tracker.ensure_running()  # its start would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = self._context.Process(target=work, args=(self.settings, theirs), daemon=True)
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        worker = _Worker(process, ours)
        threading.Thread(target=worker.converse, args=(self._said,), daemon=True).start()
        return worker

    def _bury(self, worker: _Worker) -> Loss:
        """Close the pipe of a dead worker; return how it died."""
        worker.pipe.close()
        worker.process.join()
        code, name = worker.process.exitcode, f"worker {worker.process.pid}"
        if worker.loss:
            return worker.loss
        if code < 0:
            return Loss(f"{name} was killed by {signal.Signals(-code).name}")
        return Loss(f"{name} ended with exit code {code}")


def work(settings: Settings, pipe: connection.Connection) -> None:
    """Run a worker: write the arriving tasks until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    scribe = None

    def wanted() -> bool:
        pipe.send(ALIVE)
        return not pipe.poll()

    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            scribe = scribe or Scribe(settings)
            outcome: Shard | Loss = scribe.write(task, wanted)
        except Stop:
            return
        except Exception as error:
            outcome = Loss(f"{type(error).__name__}: {error}", died=False)
        try:
            pipe.send(outcome)
        except OSError:
            return
