"""SIGKILL of workers, drivers and Ray's nodes at random moments, and workers that hang.

Whatever is killed, no text is lost, none is written twice, and the files have the same bytes.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from bulk_jobs import asking, check, files, processes, run

from shakespeare import load
from shakespeare.generation.many import cluster, shards, workers
from shakespeare.generation.many.jobs import MANIFEST, BulkError

pytestmark = pytest.mark.full
KILLS = int(os.environ.get("KILLS", 6))
with_ray = pytest.mark.filterwarnings("default")  # Ray's own warnings are no errors


def drive(job, out: Path, address: str | None) -> None:
    """A driver in a process of its own, until its job is complete."""
    place = workers.here("cpu", 2, None)
    if address:
        place = cluster.connected(address, "cpu", None, None)
    with place as open_workers:
        run(job, out, open_workers)


def children(pid: int) -> list[int]:
    """The processes that a process has started, but multiprocessing's tracker."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        return [each for each in map(int, found.read_text().split()) if b"spawn_main" in command(each)]
    return []


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def actors() -> list[int]:
    """The processes of the actors: Ray names them after their class."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if command(pid).startswith(b"ray::Actor")]


def kill_at_random_moments(job, expected, out: Path, kill, address: str | None = None) -> int:
    """Run drivers of a job, one after the other, and jobs, while KILLS kills fall. Return the number of jobs.

    kill(driver, chance): kills something that runs, and says whether it did.
    """
    chance, killed, jobs = random.Random(KILLS), 0, 0
    spawn = multiprocessing.get_context("spawn")
    while killed < KILLS:
        directory = out / str(jobs)
        jobs += 1
        complete = False
        while not complete:
            driver = spawn.Process(target=drive, args=(job, directory, address))
            driver.start()
            while driver.is_alive():
                driver.join(chance.uniform(0, 4))
                if driver.is_alive() and killed < KILLS:
                    killed += kill(driver, chance)
            assert driver.exitcode in (0, -signal.SIGKILL)
            with contextlib.suppress(OSError):
                complete = json.loads((directory / MANIFEST).read_text())["complete"]
        check(directory, expected)
    return jobs


def kill_one(pids: list[int], chance) -> bool:
    with contextlib.suppress(ProcessLookupError):
        if pids:
            os.kill(chance.choice(pids), signal.SIGKILL)
            return True
    return False


def test_killed_workers_and_drivers_cost_a_retry(slow, slow_expected, tmp_path):
    """While they start, and while they write."""

    def kill(driver, chance):
        return kill_one([driver.pid] if chance.random() < 0.3 else children(driver.pid), chance)

    kill_at_random_moments(slow, slow_expected, tmp_path, kill)


@pytest.mark.parametrize("begun", [False, True])
def test_a_worker_that_hangs_is_killed_and_its_file_tried_again(job, expected, tmp_path, caplog, begun):
    """A stopped process hangs too. The driver names the file in one line."""
    stopped = []

    def opened(order, shards):
        (made,) = processes(1)(order, shards)
        start = made.start

        def started(task):
            future = start(task)
            if bool(task) == begun and not stopped:
                stopped.extend(made.pool._processes)
                os.kill(stopped[0], signal.SIGSTOP)
            return future

        made.start = started
        return [made]

    run(job, tmp_path, opened, timeout=15.0)
    lost = check(tmp_path, expected)["workers_lost"]
    reason = f"a worker took more than 15 s for {min(expected) if begun else 'its start'} and was killed"
    assert reason in caplog.messages
    assert not begun or {"shard": min(expected), "reason": f"BulkError: {reason}"} in lost


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes with one CPU each, beside the head, which has none."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


@with_ray
def test_killed_actors_nodes_and_drivers_cost_a_retry(nodes, slow, slow_expected, tmp_path):
    def kill(driver, chance):
        what = chance.random()
        if what < 0.2:
            nodes.remove_node(chance.choice(list(nodes.worker_nodes)), allow_graceful=False)
            nodes.add_node(num_cpus=1)
            return True
        return kill_one([driver.pid] if what < 0.4 else actors(), chance)

    kill_at_random_moments(slow, slow_expected, tmp_path, kill, nodes.address)


@with_ray
def test_actors_bring_the_package_and_need_the_folder(nodes, job, tmp_path, monkeypatch):
    """A node that does not see the driver's folder says so in one line."""
    with cluster.connected(nodes.address, "cpu", None, None) as open_workers:
        (worker,) = open_workers(cluster.Order(job.settings, 4, str(tmp_path)), 1)
        error = worker.start(None).result()
    assert isinstance(error, BulkError) and "--out must be a URL, or a folder that all machines" in str(error)
    with pytest.raises(BulkError, match="--gpus is 1; the Ray cluster has 0"):
        with cluster.connected(nodes.address, "cuda", None, None):
            pass


@with_ray
def test_an_actor_that_starts_again_has_its_model(nodes, job, tmp_path):
    """One that is too large for a message: Ray keeps it as long as the driver does."""
    checkpoint = load("shakes128")
    changed = asking(job.settings, ids=tuple(checkpoint.tokenizer.encode("\n")), max_new_tokens=5)
    settings = replace(changed, model="shakes128", fingerprint=shards.fingerprint(checkpoint))
    (tmp_path / MANIFEST).touch()
    with cluster.connected(nodes.address, "cpu", None, None) as open_workers:
        (worker,) = open_workers(cluster.Order(settings, 4, str(tmp_path)), 1)
        for _ in range(2):
            assert worker.start(None).result(60) is None
            assert worker.start(shards.Task("texts-0", 0, 4)).result(60)["texts"] == 4
            assert kill_one(actors(), random)


@with_ray
def test_no_cluster_is_one_line(failed, model, monkeypatch):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(ray, "init", Mock(side_effect=ConnectionError("nobody there\nand more")))
    line = failed("bulk", "-m", model, "--texts", 1, "--out", "o", "--ray", "a:1")
    assert "no Ray cluster at 'a:1': nobody there\n" in line
    assert ray.init.call_args.args == ("a:1",) and not files(Path("o"))
