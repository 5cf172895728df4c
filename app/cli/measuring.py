"""The commands that measure: explain, profile, race and doctor; bench has a module of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from app.cli.bench import bench
from app.cli.options import (
    MOST_HEADS,
    WIDEST_HEAD,
    EngineOptions,
    dtype_option,
    engine_option,
    kv_cache_option,
    model_option,
    notice,
    one_thread_option,
    part_argument,
    seed_option,
    set_threads,
    simd_option,
    size_option,
    take,
    temperature_option,
    threads_option,
    tile_options,
    top_k_option,
    weights_option,
)
from attention_ext import PARTS, processor


@click.command()
@part_argument
@size_option("-N", "N", default=1024, help="Number of keys and of queries.")
@size_option("-d", "d", default=32, most=WIDEST_HEAD, help="Head width.")
@tile_options()
@click.option("--causal", is_flag=True, help="Use a causal mask.")
@size_option("--heads", default=4, most=MOST_HEADS, help="Number of heads.")
@one_thread_option
@simd_option
@dtype_option
@click.option(
    "--cachegrind", is_flag=True, help="Simulate the caches with valgrind; takes about fifty times as long."
)
def explain(part: str, cachegrind: bool, **sizes) -> None:
    """Show what PART costs and why: arithmetic, scratch, bytes into each cache, the bound, the time.

    The bytes are the algorithm's own count. The cache misses of one head are shown beside them if Linux's
    perf may count them, or with --cachegrind.
    """
    from lab.bench import cases
    from lab.explain import explain as explained

    cells = cases.plan(
        [part],
        lengths=[sizes["N"]],
        widths=[sizes["d"]],
        masks=[sizes["causal"]],
        heads=sizes["heads"],
        br=[sizes["br"]],
        bc=[sizes["bc"]],
        threads=[sizes["threads"]],
        simds=[sizes["simd"]],
        dtype=sizes["dtype"],
    )
    explained(cells[0], click.echo, cachegrind)


@click.command()
@part_argument
@model_option
@engine_option
@simd_option
@tile_options()
@weights_option
@kv_cache_option
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    show_default="half of the block size",
    help="Tokens of the prompt, the model's own text.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    show_default="200, or what the block size leaves",
    help="Tokens to write after the prompt.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["md", "json"]),
    default="md",
    show_default=True,
    help="Format of the table.",
)
@threads_option
def profile(model: str, form: str, threads: int | None, **options) -> None:
    """Show where a token's time goes with PART: embedding, QKV, attention, MLP, sampling and so on.

    The prefill of a prompt and the decoding after it are measured separately. The last lines show what the
    recording itself costs.
    """
    processor.let_waiting_threads_sleep()
    set_threads(threads)
    from lab import profile as profiling
    from model import load

    engine = asdict(take(EngineOptions, options))
    measured = profiling.run(load(model), model=model, **engine, **options)
    click.echo(profiling.table(measured) if form == "md" else json.dumps(profiling.figures(measured)))


@click.command()
@click.argument("parts", default=",".join(PARTS))
@model_option
@click.option("--prompt", default="\n", help="Text to continue.", show_default="a line end")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Tokens that each part writes.",
    show_default="200, or the block size if that is less",
)
@seed_option
@temperature_option
@top_k_option
@click.option("--no-kv-cache", is_flag=True, help="Recompute the whole window for each token.")
@engine_option
@simd_option
@one_thread_option
def race(
    parts: str,
    model: str,
    prompt: str,
    threads: int,
    temperature: float,
    top_k: int,
    no_kv_cache: bool,
    **options,
) -> None:
    """Let PARTS, names separated by commas, write the same text, and time each alone.

    On a terminal the texts grow in columns at their true relative speeds. A table then shows the speeds, and
    the last line whether the texts are identical; if not, the exit code is 1. part0 has the torch engine
    alone: with --engine torch the parts differ in attention only. With a KV cache a token takes one row of
    attention and the parts are close; --no-kv-cache shows the differences.
    """
    processor.let_waiting_threads_sleep()
    set_threads(threads)
    from generation.sampling import Sampling
    from lab import race as racing
    from model import load

    names = racing.parse_parts(parts)
    runners = racing.line_up(
        load(model),
        names,
        prompt=prompt,
        sampling=Sampling(temperature, top_k),
        use_cache=not no_kv_cache,
        **options,
    )
    notice(f"{model}, {racing.describe(runners, options['simd'], not no_kv_cache)}")
    if not racing.run(runners, prompt, click.echo):
        sys.exit(1)


@click.command()
def doctor() -> None:
    """Check what this machine offers for the parts, and name the remedy for what is missing.

    Lines that begin with -- are about optional things. The exit code is 1 if anything is broken.
    """
    from lab import doctor as examination

    if not examination.run(click.echo):
        sys.exit(1)


COMMANDS = (bench, explain, profile, race, doctor)
