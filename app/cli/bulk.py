"""bulk: very many texts in files, over processes or a cluster."""

from dataclasses import fields
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
    options.size("--texts", "Texts to write; text i has the seed SEED + i.", most=options.LARGEST_SEED),
    options.folder("--out", "Directory of the files.", required=True),
    options.choice("--part", "Attention to use.", of=PARTS, default="part4"),
    options.cpu_or_cuda,
    options.choice("--format", "Format of the files; parquet needs pyarrow.", of=("jsonl", "parquet")),
    options.size("--workers", "Processes.", most=2**16, show_default=f"one a core, on a GPU {GPU_WORKERS}"),
    options.option("--ray", "Write on this Ray cluster; 'auto' finds a running one.", metavar="ADDRESS"),
    options.file("--prompts", 'File with a text in each line: {"id": ..., "prompt": ..., "options": {...}}.'),
    options.number("--timeout", TIMEOUT, least=1, most=86400, default=STALL_SECONDS),
    options.size("--shard-size", "Texts in a file.", most=10**9, show_default=SIZES),
    options.prompt,
    options.sampling,
    options.text(options.any_seed(default=1337, callback=None)),  # a job that goes on keeps the one it drew
    options.engine,
    options.simd,
    options.weights,
    options.kv_cache,
)


@click.command()
@bulk_options
def bulk(out: Path, workers: int | None, ray: str | None, timeout: float, **asked) -> bool:
    """Write very many texts to files, over processes or a Ray cluster. Run again, it continues.

    A file holds SHARD_SIZE texts. OUT/manifest.json records the request and the files that are complete. The
    bytes of a file are the same for any number of workers, kills and restarts. Ctrl-C stops; the same
    command continues. The exit code is 1 if files were left out because their workers died repeatedly.
    """
    cuda = asked["device"] == "cuda"
    options.check()
    if cuda:
        options.refuse(("ray",), "does not go with --device cuda: its processes share the first GPU here")
    if asked["prompts"] is not None:
        options.refuse(("texts", "prompt", "prompt_file"), "does not go with --prompts")
    elif asked["texts"] is None:
        raise click.UsageError("give --texts N or --prompts FILE")
    processor.let_waiting_threads_sleep()
    from shakespeare.generation.many import bulk as writing_many
    from shakespeare.generation.many.processes import local_pool

    asked["shard_size"] = asked["shard_size"] or (GPU_SHARD_SIZE if cuda else SHARD_SIZE)
    processes = workers or (GPU_WORKERS if cuda else processor.cores())
    job = job_of(**asked)

    def open_pool(settings, shards):
        if ray is None:
            return local_pool(settings, min(processes, shards), timeout)
        from shakespeare.generation.many import cluster

        return cluster.open_pool(ray, workers, settings, shards, timeout)

    with progress() as (update, say):

        def show(state: "Progress") -> None:
            update(completed=state.texts, total=state.total, description=described(state))

        try:
            manifest = writing_many.run(job, out, open_pool, say, show)
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


def job_of(prompts: Path | None, texts: int | None, shard_size: int, **asked) -> "Job":
    """The job that the options ask for. Raises ValueError, CheckpointError or BuildError."""
    from shakespeare.generation.many import shards
    from shakespeare.generation.many.jobs import Job, Prompts
    from shakespeare.model import load

    if asked["format"] == "parquet":
        shards.check_parquet()
    checkpoint = load(asked["model"])
    found = None if prompts is None else Prompts(prompts, shard_size)
    if found is None:
        asked["prompt"] = options.read_prompt(asked["prompt"], asked["prompt_file"]) or "\n"
        options.encoded(checkpoint.tokenizer, asked["prompt"])
    options.warn_of_stops(checkpoint.tokenizer, asked["stop"])
    if asked["max_new_tokens"] is None:
        asked["max_new_tokens"] = checkpoint.config.block_size
    asked["sampling"] = options.take_sampling(asked)
    asked["fingerprint"] = shards.fingerprint(checkpoint)
    asked["use_cache"] = not asked["no_kv_cache"]
    names = {field.name for field in fields(shards.Settings)} & asked.keys()
    settings = shards.Settings(**{name: asked[name] for name in names})
    shards.request_for(settings, checkpoint.tokenizer, 0)  # checks the settings
    texts = found.lines if found else texts or 0
    return Job(settings, texts, shard_size, found, shards.resolved(settings, checkpoint, shard_size))


def described(state: "Progress") -> str:
    """The line beside the bar: texts, tokens per second, time left, workers lost."""
    line = f"{state.texts:,} of {state.total:,} texts"
    if state.done:
        left = timedelta(seconds=int((state.total - state.texts) * state.seconds / state.done))
        line += f", {state.tokens / state.seconds:,.0f} tokens/s, {left} left"
    return f"{line}, {state.lost} workers lost"
