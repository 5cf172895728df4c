"""SIGKILL of workers at six random moments, on one machine and on Ray, and workers that stall.

However a worker is killed, no text is lost, none is written twice, and its files have the same bytes.
"""

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from bulk_jobs import check

from shakespeare.generation.many import STALL_SECONDS, bulk, cluster
from shakespeare.generation.many.jobs import BulkError
from shakespeare.generation.many.processes import Pool, local_pool

pytestmark = pytest.mark.full

KILLS = 6


def kill_at_random_moments(job, expected, seconds, out: Path, open_pool, kill) -> list[str]:
    """Run a job, and again until it is complete, while `kill` is called at KILLS moments of its `seconds`.

    kill(chance): kills something that runs, if there is anything. This thread calls it: Ray starts nodes in
    the main thread only. A moment after the end of the job does not count; it is drawn again for another one.
    Returns why workers were lost.
    """
    chance, killed, lost = random.Random(KILLS), 0, []
    while killed < KILLS:
        directory = out / str(killed)
        moments = sorted(chance.uniform(0, seconds) for _ in range(KILLS - killed))
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(run_to_the_end, job, directory, open_pool)
            began = time.monotonic()
            for moment in moments:
                wait([done], max(0.0, began + moment - time.monotonic()))
                while not (done.done() or (at_once := kill(chance))):  # there may be nothing to kill yet
                    wait([done], 0.01)
                if done.done():
                    break
                killed += at_once
            done.result()
        manifest = check(directory, expected, job.texts)
        lost += [loss["reason"] for loss in manifest["workers_lost"]]
        if killed < KILLS:
            print(f"{KILLS - killed} of {len(moments)} moments fell after the end of the job")
    assert lost
    return lost


def run_to_the_end(job, directory: Path, open_pool) -> None:
    complete = False
    while not complete:
        with contextlib.suppress(BulkError):
            complete = bulk.run(job, directory, open_pool).content["complete"]


def kill_process(pids: list[int], chance) -> bool:
    with contextlib.suppress(ProcessLookupError):
        if pids:
            os.kill(chance.choice(pids), signal.SIGKILL)
            return True
    return False


def opened(pools: list[Pool], settings, shards) -> Pool:
    pools.append(local_pool(settings, 2))
    return pools[-1]


def test_killed_workers_cost_a_retry(long, long_expected, tmp_path):
    """While workers start, and while they write."""
    pools: list[Pool] = []
    open_pool = partial(opened, pools)

    def kill(chance):
        return bool(pools) and kill_process([worker.pid for worker in pools[-1].all], chance)

    lost = kill_at_random_moments(long, *long_expected, tmp_path, open_pool, kill)
    assert all(reason.endswith("was killed by SIGKILL") for reason in lost)


def test_a_stalled_worker_is_killed_and_its_file_tried_again(slow, slow_expected, tmp_path):
    """The driver names it in one line."""
    pools, stopped, lines = list[Pool](), list[int](), list[str]()

    def progress(state):
        if state.texts and not stopped:
            stopped.append(pools[0].all[0].pid)
            os.kill(stopped[0], signal.SIGSTOP)
            pools[0]._timeout = 2.0

    def say(line):
        lines.append(line)
        pools[0]._timeout = STALL_SECONDS  # the next worker starts in its own time

    bulk.run(slow, tmp_path, partial(opened, pools), say, progress)
    reason = f"worker {stopped[0]} gave no sign of life for 2 s and was killed"
    (loss,) = [loss for loss in check(tmp_path, slow_expected)["workers_lost"] if loss["reason"] == reason]
    assert f"{reason}; it had {loss['shard']}" in lines


with_ray = pytest.mark.filterwarnings("default")  # Ray's own warnings are no errors


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes with one CPU each, beside the head, which has none."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def worker_pids() -> list[int]:
    """The processes of the actors: Ray names them after their class."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::Actor"):
                found.append(int(folder.name))
    return found


@with_ray
def test_killed_ray_workers_cost_a_retry(nodes, long, long_expected, tmp_path):
    open_pool = partial(cluster.open_pool, nodes.address, None)
    more = (tmp_path, open_pool, lambda chance: kill_process(worker_pids(), chance))
    kill_at_random_moments(long, *long_expected, *more)


@with_ray
def test_no_cluster_is_one_line(failed, model, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", Mock(side_effect=ConnectionError("nobody there\nand more")))
    line = failed("bulk", "-m", model, "--texts", 1, "--out", "o", "--ray", "a:1")
    assert "no Ray cluster at 'a:1': nobody there\n" in line
    assert ray.init.call_args.kwargs["address"] == "a:1"
