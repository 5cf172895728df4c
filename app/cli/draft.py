"""draft: what guesses a model's next tokens, so that the native engine reads several at once."""

import math
import time
from pathlib import Path

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, program
from shakespeare.attention_ext import BuildError
from shakespeare.checkpoints import PRESENT


@click.command()
@options.option("-m", "--model", f"Model: {', '.join(PRESENT)} or a directory.", required=True)
@options.path("--corpus", "corpus_file", "Text that the model learned.", show_default="what it writes itself")
def draft(model: str, corpus_file: Path | None) -> None:
    """Make the draft of a model, and write it beside the model.

    The model reads the first 90 % of the text that it learned, at most a million characters from all of it,
    or a text that it writes itself. Its probabilities after each context of at most five characters become
    the draft. It takes seconds and 656 KB, and changes no text.
    """
    from shakespeare.model.checkpoint import directory_of

    start = time.monotonic()
    path = make_draft(directory_of(model), options.read_corpus(corpus_file) if corpus_file else None)
    if path is None:
        raise click.ClickException("no draft was made")
    click.echo(f"wrote {path}: {path.stat().st_size:,} bytes, {time.monotonic() - start:.1f} s")


def make_draft(directory: Path, text: str | None, seconds: float = math.inf) -> Path | None:
    """Make the draft of the model in a directory from a text's training part; returns its path.

    text: None for one that the model writes. seconds: the most time of the model's reading. Returns None,
    with a notice, where the kernels do not compile or no draft can have the model's vocabulary.
    """
    from shakespeare.generation import draft_maker
    from shakespeare.model import corpus, load
    from shakespeare.model.checkpoint import save_draft

    checkpoint = load(str(directory))
    try:
        if text is None:
            ids = draft_maker.own_text(checkpoint)
        else:
            ids = checkpoint.tokenizer.encode(draft_maker.excerpt(corpus.split(text)[0]))
        return save_draft(directory, draft_maker.make(checkpoint, ids, seconds))
    except (BuildError, draft_maker.NoDraft) as error:
        notice(f"{program()}: warning: {error}")
        return None
