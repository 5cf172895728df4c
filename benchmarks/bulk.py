"""The speed of gpt.py bulk with 1, 2, 4 ... processes, relative to one process.

    python benchmarks/bulk.py [-m shakes256] [--workers 1,2,4] [--shard-size 2560] [--shards 2] [--ray]

Each process writes `--shards` files with one thread. The numbers of processes take turns; all must write the
same bytes. A job's time runs from its first task to its last file. It excludes the start of the processes,
some two seconds; 'with start' includes it. 'share of a core' is a worker's processor time per second: less
than 1 where other programs take the cores. 'per core-second' is a worker's output per second of processor
time, which other programs affect least. '--ray' adds actors on a Ray cluster of this machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; a file there would hide a package of its name.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from app.cli.options import Numbers  # noqa: E402
from attention_ext import processor  # noqa: E402


def powers(most: int) -> str:
    """1,2,4 ... and `most`."""
    return ",".join(map(str, sorted({most, *(2**i for i in range(most.bit_length()))})))


class Warm:
    """A Pool whose workers have each written a small shard, so that their start is not timed."""

    def __init__(self, pool, task) -> None:
        self.pool, self.workers = pool, pool.workers
        left = ready = pool.workers
        while ready:
            while left and pool.idle:
                pool.give(task)
                left -= 1
            ready -= len(pool.wait())
        self.give, self.wait, self.close = pool.give, pool.wait, pool.close
        self.began = time.perf_counter()

    @property
    def idle(self) -> int:
        """The pool's idle workers."""
        return self.pool.idle


def measure(job, open_pool) -> tuple[float, float, list[dict]]:
    """(seconds, seconds with the start of the processes, shards of the manifest) of a job."""
    from generation import bulk, shards

    pools: list[Warm] = []

    def warm(settings, count):
        pools.append(Warm(open_pool(settings, count), shards.Task(0, 1)))
        return pools[0]

    ended = 0.0

    def progress(state) -> None:
        nonlocal ended
        ended = time.perf_counter()

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        manifest = bulk.run(job, Path(out), warm, progress=progress)
    return ended - pools[0].began, ended - start, list(manifest.shards.values())


@click.command()
@click.option("-m", "--model", default="shakes256", show_default=True)
@click.option("--workers", type=Numbers(), default=powers(processor.cores()), help="Numbers of processes.")
@click.option(
    "--shard-size", type=click.IntRange(1), default=2560, show_default=True, help="Texts in a file."
)
@click.option("--shards", "each", type=click.IntRange(1), default=2, show_default=True, help="Files of each.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of each.")
@click.option("--ray", "with_ray", is_flag=True, help="Measure Ray's actors too.")
def main(
    model: str, workers: tuple[int, ...], shard_size: int, each: int, rounds: int, with_ray: bool
) -> None:
    """Print tokens per second by the number of processes."""
    processor.let_waiting_threads_sleep()
    import torch

    from generation import bulk, cluster, shards
    from generation.engine import open_engine
    from model import load

    checkpoint = load(model)
    length = checkpoint.model.config.block_size
    settings = shards.Settings(model, shards.fingerprint(checkpoint), max_new_tokens=length)
    open_engine(checkpoint.model)  # compiles it
    resolved = shards.resolved(settings, checkpoint)
    kinds: dict[str, Callable[[int], Callable]] = {
        "processes": lambda count: lambda settings, shards: bulk.LocalPool(settings, min(count, shards))
    }
    if with_ray:
        kinds["Ray"] = lambda count: partial(cluster.open_pool, "local", count)
    cases = [(kind, count) for count in workers for kind in kinds]
    found: dict[tuple[str, int], list[tuple[float, float, list[dict]]]] = {case: [] for case in cases}
    sums: dict[int, str] = {}  # SHA-256 of each file
    for _ in range(rounds):
        for kind, count in cases:
            job = bulk.Job(settings, shard_size * each * count, shard_size, resolved=resolved)
            measured = measure(job, kinds[kind](count))
            found[kind, count].append(measured)
            for shard in measured[2]:
                if sums.setdefault(shard["first"], shard["sha256"]) != shard["sha256"]:
                    raise click.ClickException(f"{count} {kind} write other bytes than other numbers do")
    name = processor.microarchitecture() or processor.name()
    click.echo(
        f"{name}, PyTorch {torch.__version__}; {model}, {shard_size} texts of {length} tokens in a file\n"
    )
    click.echo(
        "| workers | tokens/s | spread | times the first | with start | a file "
        "| share of a core | per core-second |"
    )
    click.echo("|---" * 8 + "|")
    first = None
    for (kind, count), runs in found.items():
        tokens = sum(shard["tokens"] for shard in runs[0][2])
        rates = [tokens / seconds for seconds, _, _ in runs]
        rate, whole = statistics.median(rates), statistics.median(tokens / long for _, long, _ in runs)
        files = [shard for _, _, written in runs for shard in written]
        cpu_seconds = sum(file["cpu_seconds"] for file in files)
        share = cpu_seconds / sum(file["seconds"] for file in files)
        first = first or rate
        click.echo(
            f"| {count} {kind} | {rate:,.0f} | {100 * (max(rates) - min(rates)) / rate:.0f} % "
            f"| {rate / first:.2f} | {whole:,.0f} "
            f"| {statistics.median(file['seconds'] for file in files):.1f} s | {share:.2f} "
            f"| {sum(file['tokens'] for file in files) / cpu_seconds:,.0f} |"
        )


if __name__ == "__main__":
    main()
