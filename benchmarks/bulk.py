"""The speed of gpt.py bulk with 1, 2, 4 ... processes, relative to one process.

    python -m benchmarks.bulk [-m shakes256] [--workers 1,2,4] [--shard-size 2560] [--shards 2]
    python -m benchmarks.bulk --device cuda --shard-size 8192 --shards 6 --workers 1,2

Each process writes `--shards` files with one thread. The numbers of processes take turns; all must write the
same bytes. A job's time runs from its first task to its last file. It excludes the start of the processes,
some two seconds; 'with start' includes it. 'share of a core' is a worker's processor time per second: less
than 1 where other programs take the cores. 'per core-second' is a worker's output per second of processor
time, which other programs affect least. With a GPU the last row is the engine alone: as many texts at once as
a file has, and no text is made of the tokens.
"""

import itertools
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from shakespeare.attention_ext import processor

processor.let_waiting_threads_sleep()  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.measuring import attempt, percent, show_table  # noqa: E402
from shakespeare.app.cli.options import Numbers  # noqa: E402
from shakespeare.generation.engines import cuda  # noqa: E402
from shakespeare.generation.many import bulk, shards  # noqa: E402
from shakespeare.generation.many.jobs import Job  # noqa: E402
from shakespeare.generation.many.processes import Pool, local_pool  # noqa: E402
from shakespeare.model import load  # noqa: E402

TITLES = "workers | tokens/s | spread | times the first | with start | a file | share of a core "
TITLES += "| per core-second"


def measure(job: Job, workers: int) -> tuple[float, float, list[dict]]:
    """(seconds, seconds with the start of the processes, shards of the manifest) of a job."""
    began = ended = 0.0

    def open_warm(settings: shards.Settings, count: int) -> Pool:
        """A pool whose workers have each written a small shard, so that their start is not timed."""
        nonlocal began
        pool = local_pool(settings, min(workers, count))
        left = ready = pool.workers
        # On a GPU the texts at once decide the kernel, and a larger file would open another engine.
        small = shards.Task(0, job.shard_size if settings.device == "cuda" else 1)
        while ready:
            while left and pool.idle:
                pool.give(small)
                left -= 1
            ready -= len(pool.wait())
        began = time.perf_counter()
        return pool

    def progress(state: object) -> None:
        nonlocal ended
        ended = time.perf_counter()

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        manifest = bulk.run(job, Path(out), open_warm, progress=progress)
    return ended - began, ended - start, list(manifest.shards.values())


def alone(settings: shards.Settings, texts: int, rounds: int) -> float:
    """Tokens per second of the engine of the settings, at most `texts` at once."""
    scribe = shards.Scribe(settings, texts)
    engine, texts = scribe.engine, scribe.at_once
    engine.begin(0, scribe.checkpoint.tokenizer.encode("\n"))
    engine.read(0)
    kept = engine.slots - 1  # which has the prompt; never written
    engine.copy(0, kept)
    slots, uniforms = range(texts - (kept < texts)), np.random.default_rng(0).random((engine.capacity, texts))
    rates = []
    for _ in range(1 + rounds):
        engine.copy(kept, *slots)
        tokens, start = 0, time.perf_counter()
        while tokens < settings.max_new_tokens:
            tokens += len(engine.write(slots, uniforms[tokens : settings.max_new_tokens, : len(slots)], 1.0))
        rates.append(len(slots) * tokens / (time.perf_counter() - start))
    return statistics.median(rates[1:])


@click.command(context_settings={"show_default": True})
@click.option("-m", "--model", default="shakes256")
@click.option("--workers", type=Numbers(), default=f"1:{processor.cores()}*2", help="Numbers of processes.")
@click.option("--shard-size", type=click.IntRange(1), default=2560, help="Texts in a file.")
@click.option("--shards", "files", type=click.IntRange(1), default=2, help="Files of each.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds of each.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu")
def main(model: str, workers: tuple[int, ...], shard_size: int, files: int, rounds: int, device: str) -> None:
    """Print tokens per second by the number of processes."""
    checkpoint = load(model)
    length = checkpoint.config.block_size
    settings = shards.Settings(model, shards.fingerprint(checkpoint), max_new_tokens=length, device=device)
    resolved = shards.resolved(settings, checkpoint, shard_size)
    runs: dict[int, list[tuple[float, float, list[dict]]]] = {count: [] for count in workers}
    sums: dict[int, str] = {}  # SHA-256 of each file
    failed: dict[int, str] = {}
    for _, count in itertools.product(range(rounds), workers):
        if count in failed:
            continue
        in_all = files if device == "cuda" else files * count  # a GPU is one, however many share it
        job = Job(settings, shard_size * in_all, shard_size, resolved=resolved)
        if not (run := attempt(failed, count, measure, job, count)):
            continue
        runs[count].append(run)
        for file in run[2]:
            if sums.setdefault(file["first"], file["sha256"]) != file["sha256"]:
                raise click.ClickException(f"{count} processes write other bytes than other numbers do")
    name = processor.microarchitecture() or processor.name()
    if device == "cuda":
        name += f", {cuda.gpu().name}"
    texts = f"{shard_size} texts of {length} tokens in a file"
    click.echo(f"{name}, PyTorch {torch.__version__}; {model}, {texts}\n")
    first = 0.0

    def row(count: int) -> str:
        nonlocal first
        seconds, with_start, written = zip(*runs[count])
        tokens = sum(file["tokens"] for file in written[0])
        rates, every_file = [tokens / s for s in seconds], list(itertools.chain(*written))
        rate, cpu_seconds = statistics.median(rates), sum(file["cpu_seconds"] for file in every_file)
        first = first or rate
        return (
            f"{count} | {rate:,.0f} | {percent((max(rates) - min(rates)) / rate)} | {rate / first:.2f} "
            f"| {statistics.median(tokens / s for s in with_start):,.0f} "
            f"| {statistics.median(file['seconds'] for file in every_file):.1f} s "
            f"| {cpu_seconds / sum(file['seconds'] for file in every_file):.2f} "
            f"| {sum(file['tokens'] for file in every_file) / cpu_seconds:,.0f}"
        )

    show_table(TITLES, (row(count) for count in workers if count not in failed), failed)
    if device == "cuda":
        rate = alone(replace(settings, **resolved), shard_size, rounds)
        click.echo(f"| the engine alone | {rate:,.0f} | | {rate / first:.2f} |")


if __name__ == "__main__":
    main()
