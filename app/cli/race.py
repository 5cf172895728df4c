"""race: several parts write the same text side by side."""

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice
from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.parts import able

TOKENS = "200, or the block size if that is less"


@click.command()
@click.argument("parts", type=options.Names(PARTS, files=True), required=False)
@options.model
@options.option("--prompt", "Text to continue.", default="\n", show_default="a line end")
@options.whole("--max-new-tokens", "Tokens that each part writes.", show_default=TOKENS)
@options.seed
@options.sampling
@options.no_kv_cache
@options.engine
@options.simd
@options.device
@options.kernel
@options.one_thread
def race(parts, model, prompt, threads, no_kv_cache, **asked) -> bool:
    """Let PARTS, names separated by commas, write the same text, and time each alone.

    On a terminal, and with the package rich, the texts grow in columns at their true relative speeds. A
    table then shows the speeds. The last line says whether the texts are identical; if not, the exit code
    is 1. part0 has the torch engine only; with --engine torch the parts differ in attention alone. With a KV
    cache a token takes one row of attention and the parts are close; --no-kv-cache shows the differences.
    All parts race by default; with --device cuda, part0 and part4. With --device webgpu part4 runs there, and
    the others on the CPU.
    """
    options.check()
    asked["threads"] = options.threads_for(threads)
    from shakespeare.lab import race as racing
    from shakespeare.model import load

    names = parts or (able("cuda") if asked["device"] == "cuda" else tuple(PARTS))
    asked["use_cache"] = not no_kv_cache
    sampling = options.take_sampling(asked)
    checkpoint = load(model)
    prompt = checkpoint.tokenizer.normal(prompt) or "\n"
    options.encoded(checkpoint.tokenizer, prompt)
    runners = racing.line_up(checkpoint, names, prompt=prompt, sampling=sampling, **asked)
    notice(f"{model}, {racing.describe(runners, asked['use_cache'])}")
    return racing.run(runners, prompt, click.echo)
