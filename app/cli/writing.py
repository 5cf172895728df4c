"""--inference: the options of a text, and the call that writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from app.cli.options import (
    EngineOptions,
    TextOptions,
    all_of,
    model_option,
    notice,
    number_options,
    seed_option,
    set_threads,
)
from attention_ext import processor

prompt_options = all_of(
    click.option("--prompt", help="Text to continue.", show_default="a line end"),
    click.option("--prompt-file", type=click.Path(), help="File to continue, - for standard input."),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(0),
        help="Tokens to write per sample.",
        show_default="the model's block size",
    ),
)
sampling_options = all_of(
    number_options,
    click.option("--stop", multiple=True, help="End a sample before this text; may be repeated."),
    seed_option,
    click.option(
        "--context",
        type=click.Choice(["slide", "reset"]),
        default="slide",
        show_default=True,
        help="Past the block size: slide the window, or restart it with its last half.",
    ),
    click.option("--no-kv-cache", is_flag=True, help="Recompute the whole window for each token."),
)
text_options = all_of(
    model_option,
    prompt_options,
    click.option(
        "--num-samples",
        type=click.IntRange(1),
        default=2,
        show_default=True,
        help="Samples to write; sample i has the seed SEED + i.",
    ),
    sampling_options,
)
output_options = all_of(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sample."),
    click.option("--interactive", is_flag=True, help="Continue each line that you type."),
)


def write(
    part: str,
    threads: int | None,
    engine: EngineOptions,
    texts: TextOptions,
    as_json: bool,
    interactive: bool,
) -> None:
    """Write samples to stdout as they are made, notices to stderr."""
    if texts.prompt is not None and texts.prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    if interactive and texts.prompt_file == "-":
        raise click.UsageError("--prompt-file - does not go with --interactive, which reads standard input")
    processor.let_waiting_threads_sleep()  # before read_prompt(), which imports torch
    prompt = texts.prompt if texts.prompt_file is None else read_prompt(texts.prompt_file)
    if interactive:
        prompt = prompt or None  # without a prompt the first typed line starts the text
    set_threads(threads)
    from app.cli import inference
    from model import load

    session = inference.Session(load(texts.model), part, engine, texts, prompt)
    if interactive:
        inference.converse(session, click.echo, notice)
    else:
        inference.write(session, click.echo, notice, as_json)


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input for '-'."""
    from model import corpus

    if name != "-":
        return corpus.read(Path(name))
    if sys.stdin is None:
        raise click.UsageError("--prompt-file is -, but standard input is closed")
    return corpus.decode(sys.stdin.buffer.read(), "standard input")
