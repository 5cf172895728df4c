"""The command line: parse, call, print; no maths. torch is imported by the commands that need it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from attention_ext import PARTS, SIMD, BuildError

# Kineto writes a line to stderr at each start and stop of the profiler unless told not to.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

LAB_TILE = 256
ENGINES = ("auto", "native", "torch")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Write Shakespeare with a small GPT whose attention you choose, and measure each choice.

    part0 is PyTorch, part1 naive, part2 blocked, part3 fused, part4 flash.
    """


notice = partial(click.echo, err=True)  # for the person at the terminal, never into a pipe


def set_threads(threads: int | None) -> None:
    """Fix PyTorch's threads, which are the kernels' too; None leaves its default."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


class TileSize(click.ParamType):
    """A whole number of at least 1, or 'auto', which leaves the choice to the kernel."""

    name = "n|auto"

    def convert(self, value, parameter, context) -> int | str:
        return value if value == "auto" else click.IntRange(1, 2**31 - 1).convert(value, parameter, context)


threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads to use.", show_default="PyTorch's"
)


def part_options(command: Callable) -> Callable:
    """The options that every part's command takes."""
    options = (
        click.option("-N", "N", type=click.IntRange(1, 2**31 - 1), default=1024, show_default=True,
                     help="Sequence length of the test."),
        click.option("-br", "--br", type=TileSize(), help="Rows of part4's tile, in queries.",
                     show_default=f"{LAB_TILE} in the test, auto in --inference"),
        click.option("-bc", "--bc", type=TileSize(), help="Columns of part4's tile, in keys.",
                     show_default=f"{LAB_TILE} in the test, auto in --inference"),
        threads_option,
        click.option("--simd", type=click.Choice(SIMD), default="auto", show_default=True,
                     help="SIMD helpers under parts 1 to 4; auto is portable, off plain loops."),
        click.option("--causal", is_flag=True, help="Mask the test causally; the model always is."),
        click.option("--inference", is_flag=True, help="Write text instead of running the test."),
        click.option("-m", "--model", default="shakes128", show_default=True,
                     help="Model: shakes128, shakes256, shakes1024, shakes2048, a directory or ckpt.pt."),
        click.option("--prompt", help="Text to continue.", show_default="a line end"),
        click.option("--prompt-file", type=click.Path(), help="File to continue, - for standard input."),
        click.option("--max-new-tokens", type=click.IntRange(0), help="Tokens to write per sample.",
                     show_default="the model's block size"),
        click.option("--num-samples", type=click.IntRange(1), default=2, show_default=True,
                     help="Samples to write; sample i has the seed SEED + i."),
        click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True,
                     help="Divide the logits by this; 0 takes the likeliest token."),
        click.option("--top-k", type=click.IntRange(1, 2**63 - 1), default=200, show_default=True,
                     help="Choose among the k likeliest tokens."),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True,
                     help="... among the likeliest that together have this probability."),
        click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True,
                     help="... among those with this share of the likeliest one's probability."),
        click.option("--repetition-penalty", type=click.FloatRange(0, min_open=True), default=1.0,
                     show_default=True, help="Make tokens that have occurred less likely (above 1)."),
        click.option("--stop", multiple=True, help="End a sample before this text; may be repeated."),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1337, show_default=True,
                     help="Seed of the first sample."),
        click.option("--context", type=click.Choice(["slide", "reset"]), default="slide", show_default=True,
                     help="Past the block size: slide the window, or start it again from its last half."),
        click.option("--no-kv-cache", is_flag=True, help="Recompute everything for each token."),
        click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True,
                     help="What runs the model; auto is native for parts 1 to 4, torch for part0."),
        click.option("--weights", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True,
                     help="Precision of the matrices; bf16 halves what is read for a token."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sample."),
        click.option("--interactive", is_flag=True, help="Write in turns with you."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def add_part_command(part: str) -> None:
    """The command of one row of PARTS."""

    @cli.command(part, short_help=f"{PARTS[part].title.capitalize()}: {PARTS[part].summary}.")
    @part_options
    @click.pass_context
    def command(given: click.Context, /, **options) -> None:
        refuse_options_of_the_other_mode(given)
        set_threads(options.pop("threads"))
        inference = options.pop("inference")
        for side in ("br", "bc"):
            size = options[side] or ("auto" if inference else LAB_TILE)
            options[side] = None if size == "auto" else size
        if inference:
            infer(part, **{name: value for name, value in options.items() if name not in TEST_ONLY})
        else:
            lab_test(part, **{name: options[name] for name in ("N", "br", "bc", "causal", "simd")})

    command.help = (
        f"Test {part} ({PARTS[part].summary}) against PyTorch and profile it, "
        "or write text with it (--inference)."
    )


TEST_ONLY = {"N", "causal"}
BOTH_MODES = {"br", "bc", "threads", "simd", "inference"}


def refuse_options_of_the_other_mode(context: click.Context) -> None:
    """Raise UsageError for an option that would be ignored: whoever gave it meant something by it."""
    for option in context.command.params:
        name = str(option.name)
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        if context.params["inference"] and name in TEST_ONLY:
            raise click.UsageError(f"{option.opts[0]} does not go with --inference")
        if context.params["interactive"] and name in ("num_samples", "as_json"):
            raise click.UsageError(f"{option.opts[0]} does not go with --interactive")
        if not context.params["inference"] and name not in TEST_ONLY | BOTH_MODES:
            raise click.UsageError(f"{option.opts[0]} goes with --inference only")


for _part in PARTS:
    add_part_command(_part)


def lab_test(part: str, *, N: int, br: int | None, bc: int | None, causal: bool, simd: str) -> None:
    """The lab's test; exit code 1 on a mismatch."""
    import signal

    from lab import correctness

    # Python's own handler of Ctrl-C would wait until a kernel returns.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        passed = correctness.run(part, N, br, bc, causal, simd, echo=click.echo)
    finally:
        signal.signal(signal.SIGINT, before)
    if not passed:
        sys.exit(1)


def infer(part: str, *, prompt: str | None, prompt_file: str | None, no_kv_cache: bool, engine: str,
          as_json: bool, interactive: bool, temperature: float, top_k: int, top_p: float, min_p: float,
          repetition_penalty: float, **options) -> None:  # fmt: skip
    """Write samples to stdout as they are made, notices to stderr."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    if interactive and prompt_file == "-":
        raise click.UsageError("--prompt-file - does not go with --interactive, which reads standard input")
    if prompt_file is not None:
        prompt = read_prompt(prompt_file)

    from lab import inference
    from model import load
    from model.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    request = inference.Request(
        part=part, prompt=prompt, engine=None if engine == "auto" else engine, use_cache=not no_kv_cache,
        sampling=sampling, **options
    )  # fmt: skip
    session = inference.Session(request, load(request.model))
    if interactive:
        inference.converse(session, click.echo, notice)
    else:
        inference.write(session, click.echo, notice, as_json)


def read_prompt(name: str) -> str:
    """The text of a file, or of standard input for '-'."""
    from model import corpus

    if name != "-":
        return corpus.read(Path(name))
    if sys.stdin is None:
        raise click.UsageError("--prompt-file is -, but standard input is closed")
    return corpus.decode(sys.stdin.buffer.read(), "standard input")


@cli.command("4Daccess")
def four_d_access() -> None:
    """Read one element of a 4-D tensor through the extension's own accessor."""
    from lab import correctness

    if not correctness.four_d_access(echo=click.echo):
        sys.exit(1)


@cli.command()
@click.option("--corpus", "corpus_file", type=click.Path(), help="Use this file instead of downloading.")
def prepare(corpus_file: str | None) -> None:
    """Get Tiny Shakespeare, from a file or from the network, check it and count it."""
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
    click.echo(f"{corpus.INPUT} is what train and eval read unless told otherwise")


def read_corpus(corpus_file: str | None) -> str:
    """The given file's text, else what `prepare` left."""
    from model import corpus

    if corpus_file is None and not corpus.INPUT.exists():
        raise click.UsageError("there is no corpus yet; give --corpus FILE or run `gpt.py prepare` first")
    return corpus.read(Path(corpus_file) if corpus_file else corpus.INPUT)


@cli.command()
@click.argument("recipe", type=click.Choice(["shakes128", "shakes256", "shakes1024", "shakes2048"]))
@click.option("--corpus", "corpus_file", type=click.Path(), help="Text to learn.",
              show_default="what prepare got")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Device to train on.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False), help="Directory of the checkpoint.",
              show_default="out/RECIPE")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Train for this many steps.",
              show_default="the recipe's")  # fmt: skip
@threads_option
def train(recipe: str, corpus_file: str | None, device: str, out: str | None, steps: int | None,
          threads: int | None) -> None:  # fmt: skip
    """Train a checkpoint by the RECIPE of a shipped one. On a CPU this takes about a day."""
    import dataclasses

    from model import train as training

    text = read_corpus(corpus_file)
    set_threads(threads)
    chosen = training.RECIPES[recipe]
    if steps is not None:
        chosen = dataclasses.replace(chosen, steps=steps)
    directory = Path(out or Path("out") / recipe)
    training.train(chosen, text, device, directory, report=notice)
    click.echo(f"wrote {directory}; write text with it: python gpt.py part4 --inference -m {directory}")


@cli.command("eval")
@click.option("-m", "--model", default="shakes128", show_default=True, help="Name or path, as for a part.")
@click.option("--corpus", "corpus_file", type=click.Path(), help="Text; its last 10 % are evaluated.",
              show_default="what prepare got")  # fmt: skip
@click.option("--part", type=click.Choice(list(PARTS)), default="part0", show_default=True,
              help="Attention to evaluate with.")  # fmt: skip
@click.option("--weights", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True,
              help="Precision of the matrices.")  # fmt: skip
@threads_option
def evaluate(model: str, corpus_file: str | None, part: str, weights: str, threads: int | None) -> None:
    """Print the loss over contiguous windows of the block size, on the last 10 % of a text."""
    import torch

    from attention_ext import attention
    from model import corpus
    from model.checkpoint import load
    from model.train import evaluate as loss_of

    text = read_corpus(corpus_file)
    set_threads(threads)
    checkpoint = load(model, partial(attention, part, causal=True))
    _, held_out = corpus.split(text)
    ids = checkpoint.tokenizer.encode(held_out)
    gpt = checkpoint.model.in_bf16() if weights == "bf16" else checkpoint.model
    nats = loss_of(gpt, torch.tensor(ids)) * (len(ids) - 1) / (len(held_out) - 1)
    click.echo(f"{model}: {nats:.4f} nats = {nats / math.log(2):.4f} bits per character")
    click.echo(f"({len(held_out):,} characters, windows of {checkpoint.model.config.block_size} tokens)")


def main() -> None:
    """Run the command line; what was wrong with a request is one line on stderr and exit code 2."""
    try:
        with cli.make_context("gpt.py", sys.argv[1:]) as context:
            cli.invoke(context)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("", err=True)
        sys.exit(130)
    except BrokenPipeError:  # whoever read stdout has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, BuildError) as error:
        fail(str(error))


def fail(message: str) -> None:
    """One line on stderr, exit code 2."""
    click.echo(f"gpt.py: error: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
