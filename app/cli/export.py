"""export: a model for another program."""

import contextlib
from pathlib import Path

import click

from shakespeare.app.cli import options
from shakespeare.attention_ext import BuildError
from shakespeare.checkpoints import PRESENT


@click.command()
@options.option("-m", "--model", f"Model: {', '.join(PRESENT)} or a path.", required=True)
@options.choice(
    "--to", "Format of the result.", choices=("hf", "gguf", "nanogpt"), default=None, required=True
)
@options.path("--out", "New directory; with gguf a new file.", required=True)
@options.choice("--type", "Type of a GGUF file's matrices.", choices=("f32", "f16", "q8_0"))
def export(model: str, to: str, out: Path, type: str) -> None:
    """Write a model for transformers, llama.cpp or nanoGPT.

    hf: a directory that Hugging Face's AutoModelForCausalLM and AutoTokenizer load. gguf: a file of
    llama.cpp's architecture gpt2, written by the package gguf. nanogpt: ckpt.pt and data/NAME/meta.pkl for
    its sample.py and train.py. -m reads each of them again.
    """
    if to != "gguf":
        options.refuse(("type",), "goes with --to gguf only")
    from shakespeare.generation.texts import generate
    from shakespeare.model import export as exports
    from shakespeare.model import load

    checkpoint = load(model)
    text = ""
    if to == "hf":
        known = getattr(checkpoint.tokenizer, "characters", "\n")
        prompt = "\n" if "\n" in known else known[0]
        with contextlib.suppress(BuildError):  # without a compiler the card has no text
            text = str(generate(checkpoint, prompt, min(300, checkpoint.config.block_size), seed=1))
    click.echo(f"wrote {exports.export(model, to, out, type, text)}")
