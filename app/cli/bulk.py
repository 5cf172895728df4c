"""bulk: very many texts in files, over processes or a cluster."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, progress
from shakespeare.attention_ext import PARTS, processor
from shakespeare.generation.many import SHARD_SIZE, STALL_SECONDS

if TYPE_CHECKING:
    from shakespeare.generation.many.bulk import Progress
    from shakespeare.generation.many.jobs import Job

GPU_SHARD_SIZE = 8192  # which are written at once, if the GPU's memory suffices
GPU_WORKERS = 2  # one prepares and packs texts while the GPU writes those of the other
SIZES = f"{SHARD_SIZE}, on a GPU {GPU_SHARD_SIZE}"
TIMEOUT = "Seconds of silence after which a worker is killed and its file tried again."

bulk_options = options.all_of(
    options.model,
    options.size("--texts", "Texts to write; text i has the seed SEED + i.", maximum=options.LARGEST_SEED),
    options.folder("--out", "Directory of the files.", required=True),
    options.choice("--part", "Attention to use.", choices=PARTS, default="part4"),
    options.cpu_or_cuda,
    options.choice("--format", "Format of the files; parquet needs pyarrow.", choices=("jsonl", "parquet")),
    options.size(
        "--workers", "Processes.", maximum=2**16, show_default=f"one a core, on a GPU {GPU_WORKERS}"
    ),
    options.option("--ray", "Write on this Ray cluster; 'auto' finds a running one.", metavar="ADDRESS"),
    options.file("--prompts", 'File with a text in each line: {"id": ..., "prompt": ..., "options": {...}}.'),
    options.number("--timeout", TIMEOUT, minimum=1, maximum=86400, default=STALL_SECONDS),
    options.size("--shard-size", "Texts in a file.", maximum=10**9, show_default=SIZES),
    options.prompt,
    options.sampling,
    options.text_options(
        options.any_seed(default=1337, callback=None)
    ),  # a job that goes on keeps the one it drew
    options.engine,
    options.simd,
    options.weights,
    options.kv_cache,
)


@dataclass(frozen=True)
class BulkOptions(options.TextOptions):
    """The values of bulk's options."""

    texts: int | None
    out: Path
    part: str
    device: str
    format: str
    workers: int | None
    ray: str | None
    prompts: Path | None
    timeout: float
    shard_size: int | None
    simd: str


@click.command()
@bulk_options
@options.gathered("chosen", BulkOptions)
def bulk(chosen: BulkOptions) -> bool:
    """Write very many texts to files, over processes or a Ray cluster. Run again, it continues.

    A file holds SHARD_SIZE texts. OUT/manifest.json records the request and the files that are complete. The
    bytes of a file are the same for any number of workers, kills and restarts. Ctrl-C stops; the same
    command continues. The exit code is 1 if files were left out because their workers died repeatedly.
    """
    cuda = chosen.device == "cuda"
    out = chosen.out
    options.check()
    if cuda:
        options.refuse(("ray",), "does not go with --device cuda: its processes share the first GPU here")
    if chosen.prompts is not None:
        options.refuse(("texts", "prompt", "prompt_file"), "does not go with --prompts")
    elif chosen.texts is None:
        raise click.UsageError("give --texts N or --prompts FILE")
    processor.let_waiting_threads_sleep()
    from shakespeare.generation.many import bulk as writing_many
    from shakespeare.generation.many.processes import local_pool

    processes = chosen.workers or (GPU_WORKERS if cuda else processor.cores())
    job = job_of(chosen, chosen.shard_size or (GPU_SHARD_SIZE if cuda else SHARD_SIZE))

    def open_pool(settings, shards):
        if chosen.ray is None:
            return local_pool(settings, min(processes, shards), chosen.timeout)
        from shakespeare.generation.many import cluster

        return cluster.open_pool(chosen.ray, chosen.workers, settings, shards, chosen.timeout)

    with progress() as (update, print_line):

        def show(state: "Progress") -> None:
            update(completed=state.texts, total=state.total, description=described(state))

        try:
            manifest = writing_many.run(job, out, open_pool, print_line, show)
        except (KeyboardInterrupt, SystemExit):
            notice(f"\nstopped; the same command goes on ({out})", nl=False)
            raise
        except OSError as error:
            reason = f"{error.filename or out}: {error.strerror or error}"
            raise click.ClickException(f"{reason}; the same command goes on") from None
    shards = manifest.shards.values()
    texts, tokens = (sum(shard[name] for shard in shards) for name in ("texts", "tokens"))
    rejected = sum(len(shard["rejected"]) for shard in shards)
    left_out = len(manifest.content["failed"])
    counts = [f"{out}: {texts:,} texts, {tokens:,} tokens in {len(shards):,} files"]
    if rejected:
        counts.append(f"{rejected} lines were rejected")
    if left_out:
        counts.append(f"{left_out} files were left out")
    notice("; ".join(counts))
    return not left_out


def job_of(chosen: BulkOptions, shard_size: int) -> "Job":
    """The job that the options ask for. Raises ValueError, CheckpointError or BuildError."""
    from shakespeare.generation.many import shards
    from shakespeare.generation.many.jobs import Job, Prompts
    from shakespeare.model import load

    if chosen.format == "parquet":
        shards.check_parquet()
    checkpoint = load(chosen.model)
    prompts = Prompts(chosen.prompts, shard_size) if chosen.prompts else None
    prompt = None
    if prompts is None:
        prompt = options.read_prompt(chosen.prompt, chosen.prompt_file) or "\n"
        options.encoded(checkpoint.tokenizer, prompt)
    options.warn_of_stops(checkpoint.tokenizer, chosen.stop)
    length = chosen.max_new_tokens
    settings = options.made(
        shards.Settings,
        chosen,
        prompt=prompt,
        max_new_tokens=checkpoint.config.block_size if length is None else length,
        fingerprint=shards.fingerprint(checkpoint),
        use_cache=not chosen.no_kv_cache,
    )
    shards.request_for(settings, checkpoint.tokenizer, 0)  # checks the settings
    texts = prompts.lines if prompts else chosen.texts or 0
    return Job(settings, texts, shard_size, prompts, shards.resolved(settings, checkpoint, shard_size))


def described(state: "Progress") -> str:
    """The line beside the bar: texts, tokens per second, time left, workers lost."""
    line = f"{state.texts:,} of {state.total:,} texts"
    if state.done:
        left = timedelta(seconds=int((state.total - state.texts) * state.seconds / state.done))
        line += f", {state.tokens / state.seconds:,.0f} tokens/s, {left} left"
    return f"{line}, {state.lost} workers lost"
