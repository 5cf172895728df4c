"""eval: the loss of a model on a text."""

from pathlib import Path

import click

from shakespeare.app.cli import options
from shakespeare.attention_ext import PARTS
from shakespeare.model.corpus import LAST_TENTH

TEXT = "Text; its last 10 % are evaluated."
BETWEEN = "Evaluate another part of the text, between these shares of it."
SHARE = options.Number(0, 1)


@click.command("eval")
@options.model
@options.path("--corpus", "corpus_file", TEXT, show_default="what prepare got")
@options.choice("--part", "Attention to evaluate with.", choices=PARTS, default="part4")
@options.weights
@options.kv_cache
@options.cpu_or_cuda
@options.kernel
@options.threads
@options.option("--between", BETWEEN, type=(SHARE, SHARE), default=LAST_TENTH, metavar="SHARE SHARE")
def evaluate(
    model: str,
    corpus_file: Path | None,
    part: str,
    weights: str,
    kv_cache: str,
    device: str,
    kernel: str | None,
    threads: int | None,
    between: tuple[float, float],
) -> None:
    """Print the loss on the last 10 % of a text, over contiguous windows of the block size.

    An endless model reads the text from its beginning to its end.
    """
    options.check()
    if PARTS[part].operator and device == "cpu":
        threads = options.threads_for(threads)
    else:
        threads = options.set_threads(threads)
    from shakespeare.lab.eval import held_out_loss

    measured = held_out_loss(
        model, options.read_corpus(corpus_file), part, weights, kv_cache, device, kernel, threads, between
    )
    click.echo(f"{model}: {measured.nats:.4f} nats = {measured.bits:.4f} bits per character")
    windows = f"windows of {measured.window} tokens" if measured.window else "one text without an end"
    click.echo(f"({measured.characters:,} characters, {windows})")
