"""race: several parts write the same text side by side."""

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice
from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.parts import able
from shakespeare.generation.sampling import Sampling

TOKENS = 200  # that each part writes if the block size allows it


@click.command()
@click.argument("parts", type=options.Names(PARTS, files=True), required=False)
@options.model
@options.option("--prompt", "Text to continue.", default="\n", show_default="a line end")
@options.integer(
    "--max-new-tokens",
    "Tokens that each part writes.",
    show_default=f"{TOKENS}, or the block size if that is less",
)
@options.seed
@options.sampling
@options.no_kv_cache
@options.engine
@options.simd
@options.device
@options.kernel
@options.one_thread
def race(
    parts: tuple[str, ...] | None,
    model: str,
    prompt: str,
    max_new_tokens: int | None,
    seed: int,
    sampling: Sampling,
    no_kv_cache: bool,
    engine: str | None,
    simd: str,
    device: str,
    kernel: str | None,
    threads: int,
) -> bool:
    """Let PARTS, names separated by commas, write the same text, and time each alone.

    On a terminal, and with the package rich, the texts grow in columns at their true relative speeds. A
    table then shows the speeds. The last line says whether the texts are identical; if not, the exit code
    is 1. part0 has the torch engine only; with --engine torch the parts differ in attention alone. With a KV
    cache a token takes one row of attention and the parts are close; --no-kv-cache shows the differences.
    All parts race by default; with --device cuda, part0 and part4. With --device webgpu part4 runs there, and
    the others on the CPU.
    """
    options.check()
    threads = options.threads_for(threads)
    from shakespeare.generation.engines.engine import EngineOptions
    from shakespeare.generation.request import Request
    from shakespeare.lab import race as racing
    from shakespeare.model import load

    if parts is None:
        parts = able("cuda") if device == "cuda" else tuple(PARTS)
    checkpoint = load(model)
    prompt = checkpoint.tokenizer.normal(prompt) or "\n"
    request = Request(
        options.encoded(checkpoint.tokenizer, prompt),
        seed=seed,
        sampling=sampling,
        max_new_tokens=max_new_tokens or min(TOKENS, checkpoint.config.block_size),
        use_cache=not no_kv_cache,
    )
    opened = EngineOptions(engine, simd=simd, device=device, kernel=kernel, threads=threads)
    runners = racing.line_up(checkpoint, parts, request, opened)
    notice(f"{model}, {racing.describe(runners, not no_kv_cache)}")
    return racing.run(runners, prompt, click.echo)
