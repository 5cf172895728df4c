"""Workers that write shards into a store. Those here are processes of this machine; cluster.py has Ray's."""

import functools
import gc
import multiprocessing
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Protocol

from shakespeare.attention_ext.processor import cores
from shakespeare.generation.many import GPU_WORKERS
from shakespeare.generation.many.jobs import BulkError
from shakespeare.generation.many.shards import Scribe, Settings, Task
from shakespeare.generation.many.stores import MANIFEST, open_store

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that a process may use


@dataclass(frozen=True)
class Order:
    """What all workers of a job are told. texts: the most of a shard. out: a folder's name or a URL."""

    settings: Settings
    texts: int
    out: str


class Worker(Protocol):
    """A worker as the driver sees it."""

    def start(self, task: Task | None) -> Future:
        """Let it work() on a task, or for None begin, also after its death, which is its future's error."""

    def end(self) -> None:
        """Kill it."""


@functools.cache
def _scribe(order: Order) -> Scribe:
    """This process's. Raises BulkError if it does not see the driver's files."""
    warnings.simplefilter("ignore")  # the driver has shown them
    gc.set_threshold(100_000)  # thousands of texts live at a time, and few objects are in cycles
    try:
        open_store(order.out).open(MANIFEST).close()
    except FileNotFoundError:
        missing = f"{platform.node()} does not find {order.out}/{MANIFEST}"
        raise BulkError(f"{missing}: --out must be a URL, or a folder that all machines share") from None
    return Scribe(order.settings, order.texts)


def work(order: Order, task: Task | None) -> dict[str, Any] | Exception | None:
    """In a worker: write a task's file and return its record, or for None open the engine; or the error."""
    try:
        scribe = _scribe(order)
        if task is None:
            return None
        data, record = scribe.write(task)
        stamp = open_store(order.out).write(task.name, data)
        node = platform.node()
        gpu = os.environ.get(VISIBLE)
        return record | {"stamp": stamp, "device": f"{node} GPU {gpu}" if gpu else node}
    except Exception as error:
        return error


@dataclass
class Process:
    """A process of this machine: a pool of one, so that its death costs one shard. gpu: its VISIBLE."""

    order: Order
    gpu: str | None = None
    pool: Any = None

    def start(self, task: Task | None) -> Future:
        """As Worker.start()."""
        if task is None:
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(1, spawn, _begin, (self.gpu,))
        if sys.platform != "win32":  # Ctrl-C reaches all processes of a terminal; only the driver handles it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self.pool.submit(work, self.order, task)
        finally:
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def end(self) -> None:
        """As Worker.end()."""
        for process in getattr(self.pool, "_processes", {}).values():  # Python 3.14 has kill_workers()
            process.kill()


def _begin(gpu: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    threading.Thread(target=_end_with_driver, daemon=True).start()


def _end_with_driver() -> None:
    """A pool's process would wait for its next task also when the driver was killed."""
    driver: Any = multiprocessing.parent_process()
    driver.join()
    os._exit(1)


@contextmanager
def here(
    device: str, workers: int | None, gpus: int | None
) -> Iterator[Callable[[Order, int], list[Worker]]]:
    """What makes workers on this machine: `workers`, else one a core, or GPU_WORKERS a GPU.

    gpus: the most to use. Raises BulkError if there are fewer.
    """
    used: list[Any] = [None]
    count = cores()
    if device == "cuda":
        used = visible_gpus(gpus)
        count = GPU_WORKERS * len(used)
    places = list(islice(cycle(used), workers or count))
    yield lambda order, shards: [Process(order, gpu) for gpu in places[:shards]]


def visible_gpus(count: int | None) -> list[str]:
    """The first `count` of the GPUs that this process may use, or all. Raises BulkError for too many."""
    from shakespeare.attention_ext.cuda import driver

    number = driver.count()
    found = os.environ.get(VISIBLE, ",".join(map(str, range(number)))).split(",")[:number]
    if (count or 1) > number:
        raise BulkError(f"--gpus is {count or 1}; this process may use {number}")
    return found[:count]
