"""Workers that write shards, here each a process, and the pool of them, which replaces lost ones."""

import contextlib
import gc
import multiprocessing
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from typing import Any

from shakespeare.generation.many import STALL_SECONDS
from shakespeare.generation.many.jobs import BulkError
from shakespeare.generation.many.shards import Loss, Scribe, Settings, Shard, Stop, Task

# What a worker says: it can take tasks; it still writes; it died.
READY = "ready"
ALIVE = "alive"
GONE = "gone"
TICK = 0.5  # seconds between two checks of the workers' silence
MOST_FAILED_STARTS = 20  # in a row


class Worker:
    """A worker as the driver sees it. Its calls raise EOFError or OSError if the worker is gone.

    A thread of the driver calls it: a process that stops within a message blocks its reader.
    """

    name: str

    def __init__(self) -> None:
        self.ready = False
        self.task: Task | None = None
        self.silent = 0.0  # seconds since it got the task, or said something
        self.loss: Loss | None = None  # why it was killed
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Wait until the worker can take tasks."""

    def write(self, task: Task) -> Iterator[Any]:
        """Let it write a task. Yields ALIVE while it does, then the Shard or the Loss."""
        raise NotImplementedError

    def end(self) -> None:
        """Kill the worker. Another thread may be waiting in another call."""

    def death(self) -> str:
        """How a worker that has ended died."""
        raise NotImplementedError

    def converse(self, messages: "queue.SimpleQueue[tuple[Worker, Any]]") -> None:
        """Pass on tasks and put the worker's messages into `messages`, until it is gone or a task is None."""
        try:
            self.start()
            messages.put((self, READY))
            for task in iter(self.tasks.get, None):
                for word in self.write(task):
                    messages.put((self, word))
        except Exception as error:
            if not isinstance(error, (EOFError, OSError)):
                self.loss = Loss(f"{type(error).__name__}: {error}")
            messages.put((self, GONE))


class Pool:
    """Workers that write shards. start: starts one. closed: is called after all were killed.

    timeout: seconds of silence after which a worker is killed.
    """

    def __init__(
        self,
        start: Callable[[], Worker],
        workers: int,
        timeout: float = STALL_SECONDS,
        closed: Callable[[], object] = lambda: None,
    ) -> None:
        self.workers = workers
        self._new = start
        self._timeout = timeout
        self._closed = closed
        self._messages: queue.SimpleQueue[tuple[Worker, Any]] = queue.SimpleQueue()
        self._failed_starts = 0
        self._looked = time.monotonic()  # when silence was measured last
        self.all = [self._start() for _ in range(workers)]

    @property
    def idle(self) -> int:
        """Tasks that the pool can take now."""
        return sum(worker.ready and worker.task is None for worker in self.all)

    def give(self, task: Task) -> None:
        """Let a worker write a task."""
        worker = next(worker for worker in self.all if worker.ready and worker.task is None)
        worker.task = task
        worker.silent = 0.0
        worker.tasks.put(task)

    def wait(self) -> list[tuple[Task, Shard | Loss]]:
        """Wait until a task has ended, or a worker may take one; return the tasks that have ended."""
        while True:
            with contextlib.suppress(queue.Empty):
                worker, word = self._messages.get(timeout=TICK)
                if word == READY:
                    worker.ready = True
                    self._failed_starts = 0
                    return []
                if word == ALIVE:
                    worker.silent = 0.0
                else:
                    task = worker.task
                    worker.task = None
                    if word == GONE:
                        worker.end()
                        self.all[self.all.index(worker)] = self._start()
                        word = worker.loss or Loss(worker.death())
                    if task:
                        return [(task, word)]
                    self._failed_starts += 1
                    if self._failed_starts > MOST_FAILED_STARTS:
                        raise BulkError(f"no worker starts: {word.reason}")
            # Ctrl-Z stops the workers too, so only time in which the driver runs counts.
            now = time.monotonic()
            passed = min(now - self._looked, 2 * TICK)
            self._looked = now
            for worker in self.all:
                worker.silent += passed
                if worker.task and worker.silent > self._timeout and not worker.loss:
                    reason = f"{worker.name} gave no sign of life for {self._timeout:g} s and was killed"
                    worker.loss = Loss(reason, stalled=True)
                    worker.end()  # its thread notices

    def close(self) -> None:
        """End all workers at once: they hold nothing that the driver lacks."""
        for worker in self.all:
            worker.end()
            worker.tasks.put(None)
        self._closed()

    def _start(self) -> Worker:
        worker = self._new()
        threading.Thread(target=worker.converse, args=(self._messages,), daemon=True).start()
        return worker


class Process(Worker):
    """A process of this machine, with one thread and its own engine."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(settings, theirs), daemon=True)
        if sys.platform == "win32":  # it blocks no signals
            self._process.start()
        else:
            # Ctrl-C reaches all processes of a terminal; only the driver handles it.
            resource_tracker.ensure_running()  # its start would unblock the signal
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.pid = self._process.pid
        self.name = f"worker {self.pid}"

    def write(self, task: Task) -> Iterator[Any]:
        self._pipe.send(task)
        while (word := self._pipe.recv()) == ALIVE:
            yield word
        yield word

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def death(self) -> str:
        code = self._process.exitcode or 0
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"


def local_pool(settings: Settings, workers: int, timeout: float = STALL_SECONDS) -> Pool:
    """Processes of this machine."""
    return Pool(lambda: Process(settings), workers, timeout)


def work(settings: Settings, pipe: connection.Connection) -> None:
    """Run a worker: write the arriving tasks until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(100_000)  # thousands of texts live at a time, and few objects are in cycles
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
            if scribe is None or scribe.texts < task.count:
                scribe = Scribe(settings, task.count)
            outcome: Shard | Loss = scribe.write(task, wanted)
        except Stop:
            return
        except Exception as error:
            outcome = Loss(f"{type(error).__name__}: {error}", died=False)
        try:
            pipe.send(outcome)
        except OSError:
            return
