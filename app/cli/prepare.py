"""prepare: a text in nanoGPT's layout, which train and eval read by default."""

from hashlib import sha256
from pathlib import Path

import click

from shakespeare.app.cli import options

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MAX_CHARACTERS = 2**16  # different ones, which the ids of train.bin tell apart


@click.command()
@options.path("--corpus", "corpus_file", "Use this file instead of downloading.")
@options.folder("--out", "Folder of the files.", show_default="data/shakespeare_char")
def prepare(corpus_file: Path | None, out: Path | None) -> None:
    """Get Tiny Shakespeare from the network or a file, check it and write it as nanoGPT does.

    OUT gets input.txt, which train and eval read by default, and what nanoGPT's train.py reads: train.bin
    and val.bin, the ids of the first 90 % and of the rest, and meta.pkl. meta.json is the vocabulary too.
    data/shakespeare_char/prepare.py is this command with the script's own folder as OUT.
    """
    import numpy as np

    from shakespeare.model import corpus
    from shakespeare.model.files import write_file
    from shakespeare.model.tokenizer import CharTokenizer

    folder = out or corpus.INPUT.parent
    path = corpus_file or download(folder)
    text = corpus.read(path)
    tokenizer = CharTokenizer.from_text(text)
    characters = tokenizer.characters
    if len(characters) > MAX_CHARACTERS:
        has = f"{path} has {len(characters)} different characters"
        raise ValueError(f"{has}; it must have at most {MAX_CHARACTERS}, for train.bin")
    training, validation = corpus.split(tokenizer.encode_array(text))
    known = sha256(text.encode()).hexdigest() == corpus.SHA256
    click.echo(f"{path}: {'' if known else 'not '}Tiny Shakespeare")
    click.echo(f"length of dataset in characters: {len(text):,}")
    click.echo(f"vocabulary: {len(tokenizer)} characters")
    click.echo(f"training: {len(training):,} characters, validation: {len(validation):,}")
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / corpus.INPUT.name, text.encode())
    write_file(folder / "train.bin", training.astype(np.uint16).tobytes())
    write_file(folder / "val.bin", validation.astype(np.uint16).tobytes())
    tokenizer.write_meta_pickle(folder / "meta.pkl")
    tokenizer.write_meta_json(folder / "meta.json")
    click.echo(f"wrote {folder}; train and eval read {corpus.INPUT} by default")


def download(folder: Path) -> Path:
    """Download Tiny Shakespeare if missing. Raises ConnectionError, or ValueError for a wrong checksum."""
    import pooch
    import requests

    from shakespeare.model.corpus import INPUT, SHA256

    try:
        fetched = pooch.retrieve(URL, known_hash=f"sha256:{SHA256}", fname=INPUT.name, path=folder)
    except requests.RequestException as error:
        reason = type(error).__name__
        raise ConnectionError(f"{URL} could not be downloaded ({reason}); --corpus takes a file") from None
    return Path(fetched)
