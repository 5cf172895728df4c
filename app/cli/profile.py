"""profile: where the time of a token goes, or of a training step."""

import json

import click

from shakespeare.app.cli import options
from shakespeare.attention_ext.parts import CachePrecision, Precision

NOT_WITH_TRAIN = ("texts", "engine", "br", "bc", "weights", "kv_cache", "draft", "prompt_tokens", "tokens")
ON_CPU = ("engine", "simd", "br", "bc", "draft", "threads", "train", "batch")
MAX_BATCH = 256
MAX_TEXTS = 4096
PROMPT = "Tokens of the prompt, which is the model's own text."
TOKENS = "200, or the rest of the block size"
TRAIN = "Show where the time of a training step goes instead, for a new model of MODEL's sizes."


@click.command()
@options.part
@options.model
@options.engine
@options.simd
@options.tiles(default="auto")
@options.weights
@options.kv_cache
@options.draft
@options.integer("--prompt-tokens", PROMPT, show_default="half of the block size")
@options.integer("--tokens", "Tokens to write after the prompt.", show_default=TOKENS)
@options.choice("-o", "--output", "form", "Format of the table.", choices=("md", "json"))
@options.flag("--train", TRAIN)
@options.cpu_or_cuda
@options.size("--texts", "Texts that are written together, after one prompt.", maximum=MAX_TEXTS, default=1)
@options.size("--batch", "Batch size of a training step.", maximum=MAX_BATCH, show_default="2048 characters")
@options.threads
def profile(
    part: str,
    model: str,
    engine: str | None,
    simd: str,
    br: int | None,
    bc: int | None,
    weights: str,
    kv_cache: str,
    draft: str,
    prompt_tokens: int | None,
    tokens: int | None,
    form: str,
    train: bool,
    device: str,
    texts: int,
    batch: int | None,
    threads: int | None,
) -> None:
    """Show where a token's time goes with PART: embedding, QKV, attention, MLP, sampling and so on.

    The prefill of a prompt and the decoding after it are measured separately. The last lines show what the
    recording itself costs. With --train a training step on random text is measured, without dropout:
    PyTorch's for part0, the native one for part4. With --device cuda the cuda engine is measured, by clocks
    in its kernel.
    """
    if device == "cuda":
        options.refuse(ON_CPU, "does not go with --device cuda")
        if part != "part4":
            raise click.UsageError(f"PART is {part}; it must be part4 with --device cuda")
    else:
        useless, why = (NOT_WITH_TRAIN, "does not go with") if train else (("batch",), "needs")
        options.refuse(useless, f"{why} --train")
        options.set_threads(threads)
    from shakespeare.generation.engines.engine import EngineOptions
    from shakespeare.lab import profile as profiling
    from shakespeare.model import load

    checkpoint = load(model)
    if train:
        figures = profiling.training_figures(part, checkpoint.config, batch, simd)
    else:
        opened = EngineOptions(
            engine,
            part,
            simd,
            br,
            bc,
            Precision(weights),
            CachePrecision(kv_cache),
            device=device,
            draft=draft,
        )
        measure = profiling.on_cuda if device == "cuda" else profiling.run
        figures = measure(checkpoint, opened, model, prompt_tokens, tokens, texts)
    click.echo(profiling.table(figures) if form == "md" else json.dumps(figures))
