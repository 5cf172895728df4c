"""Workers on a Ray cluster: actors, which Ray starts again where there is room.

Nodes need the packages that this one needs, and no path: Ray brings them this package and the model.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import shakespeare
from shakespeare.attention_ext.build import prebuilt
from shakespeare.generation.many import GPU_WORKERS
from shakespeare.generation.many.jobs import BulkError
from shakespeare.generation.many.shards import Task
from shakespeare.generation.many.workers import Order, Worker, work
from shakespeare.model.checkpoint import load


@dataclass
class Actor:
    """The actor's own side."""

    order: Order

    def work(self, task: Task | None) -> Any:
        """As work()."""
        return work(self.order, task)


@dataclass
class RayWorker:
    """An actor as the driver sees it. order: Ray's reference, which the actor reads when it starts again."""

    actor: Any
    order: Any

    def start(self, task: Task | None) -> Future:
        """As Worker.start(). It lasts as long as there is no room for the actor."""
        # To begin, it waits until it has started again.
        return self.actor.work.options(max_task_retries=0 if task else -1).remote(task).future()

    def end(self) -> None:
        """As Worker.end()."""
        import ray

        ray.kill(self.actor, no_restart=False)


@contextmanager
def connected(
    address: str, device: str, workers: int | None, gpus: int | None
) -> Iterator[Callable[[Order, int], list[Worker]]]:
    """What makes workers on the cluster at an address: `workers`, or one a CPU, or GPU_WORKERS a GPU.

    gpus: the most to use. Raises BulkError without a cluster at the address, or that many GPUs.
    """
    import ray

    passed = {prebuilt.COMPILE: os.environ.get(prebuilt.COMPILE, "0")}
    brought = {"py_modules": [shakespeare], "excludes": ["*.safetensors"], "env_vars": passed}
    try:
        with warnings.catch_warnings(action="ignore"):
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=brought)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BulkError(f"no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from None
    try:
        cuda = device == "cuda"
        found = int(ray.cluster_resources().get("GPU" if cuda else "CPU", 0))
        if cuda and found < (gpus or 1):
            raise BulkError(f"--gpus is {gpus or 1}; the Ray cluster has {found}")
        share = 1 / GPU_WORKERS if cuda else 0
        room = GPU_WORKERS * (gpus or found) if cuda else max(1, found)

        def made(order: Order, shards: int) -> list[Worker]:
            actor = ray.remote(num_cpus=1, num_gpus=share, max_restarts=-1)(Actor)
            model: Any = load(order.settings.model)
            sent = ray.put(replace(order, settings=replace(order.settings, model=model)))
            return [RayWorker(actor.remote(sent), sent) for _ in range(min(workers or room, shards))]

        yield made
    finally:
        ray.shutdown()
