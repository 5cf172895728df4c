"""bulk: very many texts in files, over processes, GPUs or a cluster."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, progress
from shakespeare.attention_ext import PARTS, processor
from shakespeare.generation.many import GPU_WORKERS, SHARD_SECONDS, SHARD_SIZE
from shakespeare.generation.sampling import RANDOM

if TYPE_CHECKING:
    from shakespeare.generation.many.bulk import Progress
    from shakespeare.generation.many.jobs import Job

GPU_SHARD_SIZE = 8192  # which are written at once, if the GPU's memory suffices
SIZES = f"{SHARD_SIZE}, on a GPU {GPU_SHARD_SIZE}"
OUT = "Folder of the files, or its URL: s3://, gs:// and others of fsspec."
TIMEOUT = "Seconds for a worker's start and for a file; then it is killed, and the file tried again."

bulk_options = options.all_of(
    options.model,
    options.size("--texts", "Texts to write; text i has the seed SEED + i.", maximum=options.LARGEST_SEED),
    options.option("--out", OUT, type=options.Directory(file_okay=False), required=True),
    options.choice("--part", "Attention to use.", choices=PARTS, default="part4"),
    options.cpu_or_cuda,
    options.choice("--format", "Format of the files; parquet needs pyarrow.", choices=("jsonl", "parquet")),
    options.size(
        "--workers", "Processes.", maximum=2**16, show_default=f"one a core, or {GPU_WORKERS} a GPU"
    ),
    options.size("--gpus", "GPUs to use.", maximum=2**16, show_default="all that are visible"),
    options.option("--ray", "Write on this Ray cluster; 'auto' finds a running one.", metavar="ADDRESS"),
    options.file("--prompts", 'File with a text in each line: {"id": ..., "prompt": ..., "options": {...}}.'),
    options.number("--timeout", TIMEOUT, minimum=1, maximum=2**31, default=SHARD_SECONDS),
    options.size("--shard-size", "Texts in a file.", maximum=10**9, show_default=SIZES),
    options.flag("--verify", "Hash the complete files, and write those again that were changed."),
    options.prompt,
    options.sampling,
    # A job that goes on keeps the seed that it drew.
    options.text_options(options.any_seed(default=1337, callback=None)),
    options.engine,
    options.simd,
    options.weights,
    options.kv_cache,
)


@dataclass(frozen=True)
class BulkOptions(options.TextOptions):
    """The values of bulk's options."""

    texts: int | None
    out: str
    part: str
    device: str
    format: str
    workers: int | None
    gpus: int | None
    ray: str | None
    prompts: Path | None
    timeout: float
    shard_size: int | None
    verify: bool
    simd: str


@click.command()
@bulk_options
@options.gathered("chosen", BulkOptions)
def bulk(chosen: BulkOptions) -> bool:
    """Write very many texts to files, over processes, GPUs or a Ray cluster. Run again, it continues.

    A file holds SHARD_SIZE texts. OUT/manifest.json records the request and the files that are complete. The
    bytes of a file are the same for any number of workers, kills and restarts. Ctrl-C stops; the same
    command continues. The exit code is 1 if files were left out because they failed repeatedly.
    """
    options.check()
    options.refuse_combinations(not_with={"prompts": ("texts", "prompt", "prompt_file")})
    if chosen.texts is None and chosen.prompts is None:
        raise click.UsageError("give --texts N or --prompts FILE")
    processor.let_waiting_threads_sleep()
    from shakespeare.generation.many import cluster, workers
    from shakespeare.generation.many.bulk import run
    from shakespeare.generation.many.stores import open_store

    out = chosen.out
    open_store(out)  # before anything is compiled
    job = job_of(chosen)
    where = chosen.device, chosen.workers, chosen.gpus
    place = cluster.connected(chosen.ray, *where) if chosen.ray else workers.here(*where)

    def show(state: "Progress") -> None:
        update(completed=state.texts, total=job.texts, description=described(state, job.texts))

    try:
        with progress(times=True) as (update, _), place as open_workers:
            manifest = run(job, out, open_workers, show, chosen.timeout, chosen.verify)
    except (KeyboardInterrupt, SystemExit):
        notice(f"\nstopped; the same command goes on ({out})", nl=False)
        raise
    except OSError as error:
        reason = f"{error.filename or out}: {error.strerror or error}"
        raise click.ClickException(f"{reason}; the same command goes on") from None
    texts, tokens, rejected = manifest.totals()
    line = f"{out}: {texts:,} texts, {tokens:,} tokens in {len(manifest.shards):,} files"
    if rejected:
        line += f"; {rejected} lines were rejected"
    complete = manifest.content["complete"]
    if not complete:
        line += f"; {len(manifest.content['failed'])} files were left out"
    notice(line)
    return complete


def job_of(chosen: BulkOptions) -> "Job":
    """The job that the options ask for. Raises ValueError, CheckpointError or BuildError."""
    from shakespeare.attention_ext import default_tile
    from shakespeare.generation.engines.engine import EngineOptions
    from shakespeare.generation.many import shards
    from shakespeare.generation.many.jobs import Job, Prompts
    from shakespeare.generation.texts import capacity_for
    from shakespeare.model import load

    on_gpus = chosen.device == "cuda"
    shard_size = chosen.shard_size or (GPU_SHARD_SIZE if on_gpus else SHARD_SIZE)
    if chosen.format == "parquet":
        import pyarrow  # noqa: F401  # before anything is written
    checkpoint = load(chosen.model)
    prompts = Prompts(chosen.prompts, shard_size) if chosen.prompts else None
    prompt = options.read_prompt(chosen.prompt, chosen.prompt_file) or "\n"
    request = options.first_request(chosen, checkpoint, prompt)
    capacity = None if prompts else capacity_for(checkpoint, request)
    texts = prompts.lines if prompts else chosen.texts or 0
    br = bc = None
    if PARTS[chosen.part].tiled and not on_gpus:
        br, bc = default_tile.DEFAULT  # tuned tiles differ between machines, and with them the last bits
    engine = options.made(EngineOptions, chosen, threads=1, capacity=capacity, br=br, bc=bc)
    settings = shards.Settings(chosen.model, shards.fingerprint(checkpoint), engine, request, chosen.format)
    if not (chosen.ray and on_gpus):  # Ray's driver may have no GPU
        shards.Scribe(replace(settings, model=checkpoint), shard_size)  # compiles what workers load
    return Job(settings, texts, shard_size, prompts or prompt, chosen.seed == RANDOM)


def described(state: "Progress", total: int) -> str:
    """The line beside the bar: texts, the speed of all devices and of each, workers lost."""
    seconds = time.monotonic() - state.began
    speeds = {device: texts / seconds for device, texts in sorted(state.devices.items())}
    each = ", ".join(f"{device}: {speed:,.0f}" for device, speed in speeds.items())
    speed = f"{sum(speeds.values()):,.0f} texts/s ({each}), {state.tokens / seconds:,.0f} tokens/s"
    return f"{state.texts:,} of {total:,} texts, {speed}, {state.lost} workers lost"
