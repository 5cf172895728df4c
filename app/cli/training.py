"""prepare gets a text, and eval measures the loss of a model on it. train has its own module."""

from __future__ import annotations

from pathlib import Path

import click

from app.cli.options import (
    device_option,
    kv_cache_option,
    model_option,
    refuse_options_of_the_other_device,
    set_threads,
    step_option,
    threads_option,
    weights_option,
)
from app.cli.train import read_corpus, train
from attention_ext import PARTS


@click.command()
@click.option("--corpus", "corpus_file", type=click.Path(), help="Use this file instead of downloading.")
def prepare(corpus_file: str | None) -> None:
    """Get Tiny Shakespeare from the network or a file, check it and count its characters."""
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
    """Print the loss on the last 10 % of a text, over contiguous windows of the block size."""
    from lab import loss

    refuse_options_of_the_other_device()
    text = read_corpus(corpus_file)
    set_threads(threads)
    measured = loss.held_out(model, text, part, weights, kv_cache, device, step)
    click.echo(f"{model}: {measured.nats:.4f} nats = {measured.bits:.4f} bits per character")
    click.echo(f"({measured.characters:,} characters, windows of {measured.window} tokens)")


COMMANDS = (prepare, train, evaluate)
