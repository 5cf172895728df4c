"""profile: where the time of a token goes, or of a training step."""

from __future__ import annotations

import json
from pathlib import Path

import click

from app.cli import options

NOT_WITH_TRAIN = ("engine", "br", "bc", "weights", "kv_cache", "prompt_tokens", "tokens", "trace_file")
MOST_BATCH = 256


@click.command()
@options.part
@options.model
@options.engine
@options.simd
@options.tiles(default="auto")
@options.weights
@options.kv_cache
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
@options.choice("-o", "--output", "form", of=("md", "json"), help="Format of the table.")
@click.option(
    "--train",
    is_flag=True,
    help="Show where the time of a training step goes instead, for a new model of MODEL's sizes.",
)
@options.size(
    "--batch", most=MOST_BATCH, help="Batch size of a training step.", show_default="2048 characters"
)
@options.threads
def profile(model: str, form: str, threads: int | None, train: bool, batch: int | None, **asked) -> None:
    """Show where a token's time goes with PART: embedding, QKV, attention, MLP, sampling and so on.

    The prefill of a prompt and the decoding after it are measured separately. The last lines show what the
    recording itself costs. With --train a training step on random text is measured, without dropout:
    PyTorch's for part0, the native one for part4.
    """
    options.refuse(
        NOT_WITH_TRAIN if train else ("batch",), f"{'does not go with' if train else 'needs'} --train"
    )
    options.set_threads(threads)
    from lab import profile as profiling
    from lab import profile_training
    from model import load

    checkpoint = load(model)
    if train:
        step = profile_training.profile(asked["part"], checkpoint.model.config, batch, asked["simd"])
        click.echo(profile_training.table(step) if form == "md" else json.dumps(step))
    else:
        measured = profiling.run(checkpoint, model=model, **asked)
        click.echo(profiling.table(measured) if form == "md" else json.dumps(profiling.figures(measured)))
