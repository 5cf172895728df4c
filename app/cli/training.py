"""The commands that train: prepare gets the text, train learns it, eval measures the loss."""

from __future__ import annotations

from pathlib import Path

import click

from app.cli.options import (
    device_option,
    kv_cache_option,
    model_option,
    notice,
    refuse_options_of_the_other_device,
    set_threads,
    step_option,
    threads_option,
    weights_option,
)
from attention_ext import PARTS
from attention_ext.parts import with_gradient


@click.command()
@click.option("--corpus", "corpus_file", type=click.Path(), help="Use this file instead of downloading.")
def prepare(corpus_file: str | None) -> None:
    """Get Tiny Shakespeare, from a file or from the network, check it and count its characters."""
    from model import corpus
    from model.tokenizer import CharTokenizer

    path = Path(corpus_file) if corpus_file else corpus.download()
    text = corpus.read(path)
    tokenizer = CharTokenizer.from_text(text)
    training, validation = corpus.split(tokenizer.encode(text))
    known = "Tiny Shakespeare" if corpus.is_tiny_shakespeare(text) else "not Tiny Shakespeare"
    click.echo(f"{path}: {known}")
    click.echo(f"length of dataset in characters: {len(text):,}")
    click.echo(f"vocabulary: {len(tokenizer)} characters")
    click.echo(f"training: {len(training):,} characters, validation: {len(validation):,}")
    if corpus_file:
        corpus.INPUT.parent.mkdir(parents=True, exist_ok=True)
        corpus.INPUT.write_bytes(path.read_bytes())
    click.echo(f"train and eval read {corpus.INPUT} by default")


def read_corpus(corpus_file: str | None) -> str:
    """The given file's text, else what `prepare` left."""
    from model import corpus

    if corpus_file is None and not corpus.INPUT.exists():
        raise click.UsageError("there is no corpus yet; give --corpus FILE or run `gpt.py prepare` first")
    return corpus.read(Path(corpus_file) if corpus_file else corpus.INPUT)


@click.command()
@click.argument("recipe", type=click.Choice(["shakes128", "shakes256", "shakes1024", "shakes2048"]))
@click.option(
    "--corpus", "corpus_file", type=click.Path(), help="Text to learn.", show_default="what prepare got"
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device to train on.",
)
@click.option(
    "--out", type=click.Path(file_okay=False), help="Directory of the checkpoint.", show_default="out/RECIPE"
)
@click.option(
    "--steps", type=click.IntRange(1), help="Train for this many steps.", show_default="the recipe's"
)
@click.option(
    "--part",
    type=click.Choice(with_gradient()),
    default="part0",
    show_default=True,
    help="Attention to train with; part4 has no dropout inside, and a gradient on the CPU only.",
)
@threads_option
def train(
    recipe: str,
    corpus_file: str | None,
    device: str,
    out: str | None,
    steps: int | None,
    part: str,
    threads: int | None,
) -> None:
    """Train a checkpoint by the RECIPE of a shipped one. On a CPU this takes about a day."""
    import dataclasses
    from functools import partial

    from attention_ext import attention
    from training.recipe import RECIPES
    from training.run import train as run

    if device == "cuda" and part != "part0":
        raise click.UsageError(f"{part} has no gradient on CUDA; --part {part} goes with --device cpu only")

    text = read_corpus(corpus_file)
    set_threads(threads)
    chosen = RECIPES[recipe]
    if steps is not None:
        chosen = dataclasses.replace(chosen, steps=steps)
    directory = Path(out or Path("out") / recipe)
    attend = None if part == "part0" else partial(attention, part, causal=True)
    run(chosen, text, device, directory, notice, attend)
    click.echo(f"wrote {directory}; write text with it: python gpt.py part4 --inference -m {directory}")


@click.command("eval")
@model_option
@click.option(
    "--corpus",
    "corpus_file",
    type=click.Path(),
    help="Text; its last 10 % are evaluated.",
    show_default="what prepare got",
)
@click.option(
    "--part",
    type=click.Choice(list(PARTS)),
    default="part0",
    show_default=True,
    help="Attention to evaluate with.",
)
@weights_option
@kv_cache_option
@device_option
@step_option
@threads_option
def evaluate(
    model: str,
    corpus_file: str | None,
    part: str,
    weights: str,
    kv_cache: str,
    device: str,
    step: str | None,
    threads: int | None,
) -> None:
    """Print the loss over contiguous windows of the block size, on the last 10 % of a text."""
    from lab import loss

    refuse_options_of_the_other_device()
    text = read_corpus(corpus_file)
    set_threads(threads)
    measured = loss.held_out(model, text, part, weights, kv_cache, device, step)
    click.echo(f"{model}: {measured.nats:.4f} nats = {measured.bits:.4f} bits per character")
    click.echo(f"({measured.characters:,} characters, windows of {measured.window} tokens)")


COMMANDS = (prepare, train, evaluate)
