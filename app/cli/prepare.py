"""prepare: the text that train and eval read by default."""

from pathlib import Path

import click

from app.cli import options


@click.command()
@options.path("--corpus", "corpus_file", "Use this file instead of downloading.")
def prepare(corpus_file: Path | None) -> None:
    """Get Tiny Shakespeare from the network or a file, check it and count its characters."""
    from model import corpus
    from model.tokenizer import CharTokenizer

    path = corpus_file or corpus.download()
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
