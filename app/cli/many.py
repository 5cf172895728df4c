"""bulk: very many texts in files, over processes or a cluster."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from app.cli import writing
from app.cli.options import (
    all_of,
    engine_option,
    kv_cache_option,
    model_option,
    notice,
    program,
    simd_option,
    size_option,
    take_sampling,
    weights_option,
)
from attention_ext import PARTS, processor
from generation.sampling import Sampling

FORMATS = ("jsonl", "parquet")
STALL_SECONDS = 120.0  # generation.processes.STALL_SECONDS, which needs torch
REFRESH_SECONDS = 0.5  # least time between two pictures of the progress bar


class Directory(click.Path):
    """A directory's path. The empty path, which an unset variable gives, is refused."""

    def convert(self, value, parameter, context):
        if value == "":
            self.fail("'' is no directory; '.' is this one")
        return super().convert(value, parameter, context)


bulk_options = all_of(
    model_option,
    size_option("--texts", most=2**63 - 1, help="Texts to write; text i has the seed SEED + i."),
    click.option(
        "--out",
        type=Directory(file_okay=False, path_type=Path),
        required=True,
        help="Directory of the files.",
    ),
    click.option(
        "--part", type=click.Choice(list(PARTS)), default="part4", show_default=True, help="Attention to use."
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        default="jsonl",
        show_default=True,
        help="Format of the files; parquet needs pyarrow.",
    ),
    size_option("--workers", most=2**16, help="Processes.", show_default="one a core"),
    click.option("--ray", metavar="ADDRESS", help="Write on this Ray cluster; 'auto' finds a running one."),
    click.option(
        "--prompts",
        type=click.Path(dir_okay=False, path_type=Path),
        help='File with a text in each line: {"id": ..., "prompt": ..., "options": {...}}.',
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(1, 86400),
        default=STALL_SECONDS,
        show_default=True,
        help="Seconds of silence after which a worker is killed and its file tried again.",
    ),
    size_option("--shard-size", default=1024, most=10**9, help="Texts in a file."),
    writing.prompt_options,
    writing.sampling_options,
    engine_option,
    simd_option,
    weights_option,
    kv_cache_option,
)


@click.command()
@bulk_options
def bulk(out: Path, workers: int | None, ray: str | None, timeout: float, **options) -> None:
    """Write very many texts to files, over processes or a Ray cluster. Run again, it continues.

    A file holds SHARD_SIZE texts. OUT/manifest.json records the request and the files that are complete. The
    bytes of a file are the same for any number of workers, kills and restarts. Ctrl-C stops; the same
    command continues. The exit code is 1 if files were left out because their workers died repeatedly.
    """
    if options["prompts"] is None and options["texts"] is None:
        raise click.UsageError("give --texts N or --prompts FILE")
    if options["prompts"] is not None:
        for name in ("texts", "prompt", "prompt_file"):
            if options[name] is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} does not go with --prompts")
    if options["prompt"] is not None and options["prompt_file"] is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    processor.let_waiting_threads_sleep()
    from generation import bulk as writing_many

    job = job_of(sampling=take_sampling(options), **options)
    if ray is None:
        count = workers or processor.cores()
        open_pool = partial(local_pool, count, timeout=timeout)
    else:
        from generation import cluster

        open_pool = partial(cluster.open_pool, ray, workers, timeout=timeout)
    with progress_bar() as (show, say):
        try:
            manifest = writing_many.run(job, out, open_pool, say, show)
        except KeyboardInterrupt:
            notice(f"\nstopped; the same command goes on ({out})", nl=False)
            raise
        except OSError as error:
            where = error.filename or out
            raise click.ClickException(
                f"{where}: {error.strerror or error}; the same command goes on"
            ) from None
    shards = manifest.shards.values()
    rejected, left_out = sum(len(shard["rejected"]) for shard in shards), len(manifest.content["failed"])
    notice(
        f"{out}: {sum(shard['texts'] for shard in shards):,} texts, "
        f"{sum(shard['tokens'] for shard in shards):,} tokens in {len(shards):,} files"
        + f"; {rejected} lines were rejected" * bool(rejected)
        + f"; {left_out} files were left out" * bool(left_out)
    )
    if left_out:
        sys.exit(1)


def job_of(
    model: str,
    texts: int | None,
    part: str,
    form: str,
    prompts: Path | None,
    shard_size: int,
    prompt: str | None,
    prompt_file: str | None,
    max_new_tokens: int | None,
    stop: tuple[str, ...],
    seed: int,
    context: str,
    no_kv_cache: bool,
    engine: str | None,
    simd: str,
    weights: str,
    kv_cache: str,
    sampling: Sampling,
):
    """The generation.bulk.Job of the options. Raises ValueError, CheckpointError or BuildError."""
    from generation import bulk as writing_many
    from generation import shards
    from generation.engine import open_engine
    from model import load

    if form == "parquet":
        shards.check_parquet()
    checkpoint = load(model)
    if prompts is None:
        if prompt_file is not None:
            prompt = writing.read_prompt(prompt_file)
        prompt = "\n" if prompt is None else prompt
    settings = shards.Settings(
        model,
        shards.fingerprint(checkpoint),
        part,
        engine,
        simd,
        weights=weights,
        kv_cache=kv_cache,
        prompt=prompt,
        max_new_tokens=checkpoint.model.config.block_size if max_new_tokens is None else max_new_tokens,
        sampling=sampling,
        stop=stop,
        seed=seed,
        context=context,
        use_cache=not no_kv_cache,
        format=form,
    )
    shards.request_for(settings, checkpoint.tokenizer, 0)  # checks the settings
    open_engine(checkpoint.model, engine, part=part, simd=simd)  # compiles what the workers load
    found = writing_many.Prompts(prompts, shard_size) if prompts else None
    texts = found.lines if found else texts or 0
    return writing_many.Job(settings, texts, shard_size, found, shards.resolved(settings, checkpoint))


def local_pool(workers: int, settings, shards: int, timeout: float = STALL_SECONDS):
    """The processes that write, at most one for each shard."""
    from generation.bulk import LocalPool

    return LocalPool(settings, min(workers, shards), timeout)


@contextmanager
def progress_bar():
    """(show, say): show takes a generation.bulk.Progress, say prints a line above the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = BarColumn(), TextColumn("{task.description}")
    hidden = not console.is_terminal
    drawn = 0.0
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as bar:
        task = bar.add_task("starting")

        def show(state) -> None:
            nonlocal drawn
            bar.update(task, completed=state.texts, total=state.total, description=described(state))
            if time.monotonic() - drawn > REFRESH_SECONDS:
                bar.refresh()
                drawn = time.monotonic()

        def say(line: str) -> None:
            from app.cli import one_line

            text = f"{program()}: {one_line(line)}"
            notice(text) if hidden else console.print(text, markup=False)

        yield show, say


def described(state) -> str:
    """The line beside the bar: texts, tokens per second, time left, workers lost."""
    line = f"{state.texts:,} of {state.total:,} texts"
    if state.done:
        left = (state.total - state.texts) * state.seconds / state.done
        hours, seconds = divmod(int(left), 3600)
        line += f", {state.tokens / state.seconds:,.0f} tokens/s"
        line += f", {hours}:{seconds // 60:02d}:{seconds % 60:02d} left"
    return line + f", {state.lost} workers lost"


COMMANDS = (bulk,)
