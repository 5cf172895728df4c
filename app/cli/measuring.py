"""The commands that measure: explain, profile, race and doctor. bench has its own module."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from app.cli.bench import bench
from app.cli.options import (
    MOST_HEADS,
    WIDEST_HEAD,
    device_option,
    dtype_option,
    engine_option,
    kv_cache_option,
    model_option,
    notice,
    number_options,
    on_command_line,
    one_thread_option,
    part_argument,
    refuse_options_of_the_other_device,
    seed_option,
    set_threads,
    simd_option,
    size_option,
    step_option,
    take_sampling,
    threads_option,
    tile_options,
    weights_option,
)
from attention_ext import processor
from attention_ext.parts import running_on
from lab.cuda.architectures import SHEETS


@click.command()
@part_argument
@size_option("-B", "--batch", most=MOST_HEADS, help="Batch size.", show_default="1; 100 on CUDA")
@size_option("-N", "N", help="Number of keys and of queries.", show_default="1024; 4096 on CUDA")
@size_option("--queries", "cuda_queries", help="Number of queries, on CUDA.", show_default="as many as keys")
@size_option("-d", "d", default=32, most=WIDEST_HEAD, help="Head width.")
@tile_options()
@click.option("--causal", is_flag=True, help="Use a causal mask.")
@size_option("--heads", most=MOST_HEADS, help="Number of heads.", show_default="4; 1 on CUDA")
@one_thread_option
@simd_option
@dtype_option
@device_option
@step_option
@click.option(
    "--arch",
    type=click.Choice(list(SHEETS)),
    help="Explain the step for this architecture without measuring it; needs no GPU.",
)
@click.option(
    "--cachegrind", is_flag=True, help="Simulate the caches with valgrind; takes about fifty times as long."
)
def explain(
    part: str,
    device: str,
    step: str | None,
    arch: str | None,
    cuda_queries: int | None,
    cachegrind: bool,
    **sizes,
) -> None:
    """Show what PART costs and why: arithmetic, scratch, bytes into each cache, the bound, the time.

    The bytes are the algorithm's own count. The cache misses of one head are shown beside them if Linux's
    perf may count them, or with --cachegrind. With --device cuda a step of part4 is explained: registers,
    spills, occupancy, bytes through shared and global memory, the bound, the time, and the counts of Nsight
    Compute if ncu is on PATH and may count.
    """
    refuse_options_of_the_other_device()
    defaults = {"cpu": (1, 4, 1024), "cuda": (100, 1, 4096)}[device]
    for name, size in zip(("batch", "heads", "N"), defaults):
        sizes[name] = sizes[name] or size
    if device == "cuda":
        if part != "part4":
            raise click.UsageError(f"PART is {part}; it must be part4 with --device cuda")
        from lab.cuda import explain as on_cuda

        asked = {name: sizes[name] for name in ("N", "d", "batch", "heads", "causal", "dtype")}
        question = on_cuda.Question(**asked, queries=cuda_queries, step=step, arch=arch)
        on_cuda.explain(question, click.echo)
        return
    from lab.bench import cases
    from lab.explain import explain as explained

    cells = cases.plan(
        [part],
        lengths=[sizes["N"]],
        widths=[sizes["d"]],
        masks=[sizes["causal"]],
        batch=sizes["batch"],
        heads=sizes["heads"],
        br=[sizes["br"]],
        bc=[sizes["bc"]],
        threads=[sizes["threads"]],
        simds=[sizes["simd"]],
        dtype=sizes["dtype"],
    )
    explained(cells[0], click.echo, cachegrind)


# Options of `profile` that go with --train only (True), or with and without it (None).
OF_STEPS = {"batch": True, **dict.fromkeys(("part", "model", "simd", "form", "threads", "train"))}
MOST_BATCH = 256


def refuse_options_of_the_other_profile(train: bool) -> None:
    """Raise UsageError if `profile` was given an option that does not go with --train, or needs it."""
    context = click.get_current_context()
    for option in context.command.params:
        goes = OF_STEPS.get(option.name or "", False)
        if goes is None or goes is train or not on_command_line(context, option.name or ""):
            continue
        raise click.UsageError(f"{option.opts[0]} {'does not go with' if train else 'needs'} --train")


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
    help="Tokens of the prompt, which is the model's own text.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    show_default="200, or the rest of the block size",
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
@click.option(
    "--train",
    is_flag=True,
    help="Show where the time of a training step goes instead, for a new model of MODEL's sizes.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MOST_BATCH),
    help="Batch size of a training step.",
    show_default="2048 characters",
)
@threads_option
def profile(model: str, form: str, threads: int | None, train: bool, batch: int | None, **options) -> None:
    """Show where a token's time goes with PART: embedding, QKV, attention, MLP, sampling and so on.

    The prefill of a prompt and the decoding after it are measured separately. The last lines show what the
    recording itself costs. With --train a training step on random text is measured, without dropout:
    PyTorch's for part0, the native one for part4.
    """
    refuse_options_of_the_other_profile(train)
    processor.let_waiting_threads_sleep()
    set_threads(threads)
    if train:
        from lab import training
        from model import load

        step = training.profile(options["part"], load(model).model.config, batch, options["simd"])
        click.echo(training.table(step) if form == "md" else json.dumps(training.figures(step)))
        return
    from lab import profile as profiling
    from model import load

    measured = profiling.run(load(model), model=model, **options)
    click.echo(profiling.table(measured) if form == "md" else json.dumps(profiling.figures(measured)))


@click.command()
@click.argument("parts", required=False)
@model_option
@click.option("--prompt", default="\n", help="Text to continue.", show_default="a line end")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Tokens that each part writes.",
    show_default="200, or the block size if that is less",
)
@seed_option
@number_options
@click.option("--no-kv-cache", is_flag=True, help="Recompute the whole window for each token.")
@engine_option
@simd_option
@device_option
@step_option
@one_thread_option
def race(
    parts: str | None,
    model: str,
    prompt: str,
    threads: int,
    no_kv_cache: bool,
    **options,
) -> None:
    """Let PARTS, names separated by commas, write the same text, and time each alone.

    On a terminal the texts grow in columns at their true relative speeds. A table then shows the speeds. The
    last line says whether the texts are identical; if not, the exit code is 1. part0 has the torch engine
    only; with --engine torch the parts differ in attention alone. With a KV cache a token takes one row of
    attention and the parts are close; --no-kv-cache shows the differences. All parts race by default; with
    --device cuda, part0 and part4.
    """
    refuse_options_of_the_other_device()
    processor.let_waiting_threads_sleep()
    set_threads(threads)
    from lab import race as racing
    from model import load

    names = racing.parse_parts(",".join(running_on(options["device"])) if parts is None else parts)
    runners = racing.line_up(
        load(model),
        names,
        prompt=prompt,
        sampling=take_sampling(options),
        use_cache=not no_kv_cache,
        **options,
    )
    where = {name: options[name] for name in ("simd", "device", "step")}
    notice(f"{model}, {racing.describe(runners, use_cache=not no_kv_cache, **where)}")
    if not racing.run(runners, prompt, click.echo):
        sys.exit(1)


@click.command()
def doctor() -> None:
    """Check what this machine offers for the parts, and name the remedy for what is missing.

    Lines that begin with -- are about optional features. The exit code is 1 if anything is broken.
    """
    from lab import doctor as examination

    if not examination.run(click.echo):
        sys.exit(1)


COMMANDS = (bench, explain, profile, race, doctor)
