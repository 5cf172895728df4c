"""The command line: parse, call, print; no maths. torch is imported by the commands that need it."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
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


class Numbers(click.ParamType):
    """Whole numbers from 1 to `most`: '32,64', '1:8' (by 1), '1:9+2', '256:4096*2'; 'auto' where allowed."""

    name = "list"

    def __init__(self, most: int = 2**31 - 1, auto: bool = False) -> None:
        self.most, self.auto = most, auto

    def convert(self, value, parameter, context) -> tuple[int | None, ...]:
        if isinstance(value, tuple):
            return value
        numbers: list[int | None] = []
        for item in value.split(","):
            if self.auto and item == "auto":
                numbers.append(None)
                continue
            form = re.fullmatch(r"(\d{1,10})(?::(\d{1,10})(?:([*+])(\d{1,10}))?)?", item, re.ASCII)
            if not form or int(form[1]) < 1 or (form[3] and int(form[4]) < (2 if form[3] == "*" else 1)):
                auto = " or auto" * self.auto
                self.fail(f"{item!r} must be a number of at least 1, a range as 256:4096*2 or 1:9+2{auto}")
            number, last = int(form[1]), int(form[2] or form[1])
            if number > last:
                self.fail(f"{item!r} goes down; it must go up")
            if last > self.most:
                self.fail(f"{item!r} has {last}; it must be at most {self.most}")
            while number <= last and len(numbers) <= 1000:
                numbers.append(number)
                number = number * int(form[4]) if form[3] == "*" else number + int(form[4] or 1)
        if len(numbers) > 1000:
            self.fail(f"{value!r} has more than 1000 numbers")
        return tuple(dict.fromkeys(numbers))


threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads to use.", show_default="PyTorch's"
)


def part_options(command: Callable) -> Callable:
    """The options that every part's command takes."""
    options = (
        click.option(
            "-N",
            "N",
            type=click.IntRange(1, 2**31 - 1),
            default=1024,
            show_default=True,
            help="Sequence length of the test.",
        ),
        click.option(
            "-br",
            "--br",
            type=TileSize(),
            help="Rows of part4's tile, in queries.",
            show_default=f"{LAB_TILE} in the test, auto in --inference",
        ),
        click.option(
            "-bc",
            "--bc",
            type=TileSize(),
            help="Columns of part4's tile, in keys.",
            show_default=f"{LAB_TILE} in the test, auto in --inference",
        ),
        threads_option,
        click.option(
            "--simd",
            type=click.Choice(SIMD),
            default="auto",
            show_default=True,
            help="SIMD helpers under parts 1 to 4; auto is portable, off plain loops.",
        ),
        click.option("--causal", is_flag=True, help="Mask the test causally; the model always is."),
        click.option("--inference", is_flag=True, help="Write text instead of running the test."),
        click.option(
            "-m",
            "--model",
            default="shakes128",
            show_default=True,
            help="Model: shakes128, shakes256, shakes1024, shakes2048, a directory or ckpt.pt.",
        ),
        click.option("--prompt", help="Text to continue.", show_default="a line end"),
        click.option("--prompt-file", type=click.Path(), help="File to continue, - for standard input."),
        click.option(
            "--max-new-tokens",
            type=click.IntRange(0),
            help="Tokens to write per sample.",
            show_default="the model's block size",
        ),
        click.option(
            "--num-samples",
            type=click.IntRange(1),
            default=2,
            show_default=True,
            help="Samples to write; sample i has the seed SEED + i.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(0),
            default=0.8,
            show_default=True,
            help="Divide the logits by this; 0 takes the likeliest token.",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(1, 2**63 - 1),
            default=200,
            show_default=True,
            help="Choose among the k likeliest tokens.",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="... among the likeliest that together have this probability.",
        ),
        click.option(
            "--min-p",
            type=click.FloatRange(0, 1),
            default=0.0,
            show_default=True,
            help="... among those with this share of the likeliest one's probability.",
        ),
        click.option(
            "--repetition-penalty",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="Make tokens that have occurred less likely (above 1).",
        ),
        click.option("--stop", multiple=True, help="End a sample before this text; may be repeated."),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**63 - 1),
            default=1337,
            show_default=True,
            help="Seed of the first sample.",
        ),
        click.option(
            "--context",
            type=click.Choice(["slide", "reset"]),
            default="slide",
            show_default=True,
            help="Past the block size: slide the window, or start it again from its last half.",
        ),
        click.option("--no-kv-cache", is_flag=True, help="Recompute everything for each token."),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default="auto",
            show_default=True,
            help="What runs the model; auto is native for parts 1 to 4, torch for part0.",
        ),
        click.option(
            "--weights",
            type=click.Choice(["fp32", "bf16"]),
            default="fp32",
            show_default=True,
            help="Precision of the matrices; bf16 halves what is read for a token.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sample."),
        click.option("--interactive", is_flag=True, help="Write in turns with you."),
    )
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


def infer(
    part: str,
    *,
    prompt: str | None,
    prompt_file: str | None,
    no_kv_cache: bool,
    engine: str,
    as_json: bool,
    interactive: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    **options,
) -> None:
    """Write samples to stdout as they are made, notices to stderr."""
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    if interactive and prompt_file == "-":
        raise click.UsageError("--prompt-file - does not go with --interactive, which reads standard input")
    if prompt_file is not None:
        prompt = read_prompt(prompt_file)

    from app.cli import inference
    from generation.sampling import Sampling
    from model import load

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    request = inference.Request(
        part=part,
        prompt=prompt,
        engine=None if engine == "auto" else engine,
        use_cache=not no_kv_cache,
        sampling=sampling,
        **options,
    )
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
@click.option(
    "--corpus", "corpus_file", type=click.Path(), help="Text to learn.", show_default="what prepare got"
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device to train on.",
)
@click.option(
    "--out", type=click.Path(file_okay=False), help="Directory of the checkpoint.", show_default="out/RECIPE"
)
@click.option(
    "--steps", type=click.IntRange(1), help="Train for this many steps.", show_default="the recipe's"
)
@threads_option
def train(
    recipe: str, corpus_file: str | None, device: str, out: str | None, steps: int | None, threads: int | None
) -> None:
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
@click.option(
    "--weights",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Precision of the matrices.",
)
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


@cli.command()
@click.argument("parts", default=",".join(PARTS))
@click.option("-m", "--model", default="shakes128", show_default=True, help="Name or path, as for a part.")
@click.option("--prompt", default="\n", help="Text to continue.", show_default="a line end")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Tokens that each part writes.",
    show_default="200, or the block size if that is less",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=1337, show_default=True, help="Seed of the text."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="Divide the logits by this; 0 takes the likeliest token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, 2**63 - 1),
    default=200,
    show_default=True,
    help="Choose among the k likeliest tokens.",
)
@click.option("--no-kv-cache", is_flag=True, help="Recompute the whole window for each token.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="torch",
    show_default=True,
    help="What runs the model: with torch nothing but attention differs; auto is native for parts "
    "1 to 4, torch for part0, which has no other.",
)
@click.option(
    "--simd",
    type=click.Choice(SIMD),
    default="auto",
    show_default=True,
    help="SIMD helpers under parts 1 to 4.",
)
@threads_option
def race(
    parts: str,
    model: str,
    prompt: str,
    engine: str,
    no_kv_cache: bool,
    simd: str,
    temperature: float,
    top_k: int,
    threads: int | None,
    **options,
) -> None:
    """Let PARTS, all or some with commas between them, write the same text, each timed alone.

    On a terminal the texts grow in columns at their true relative speeds. Then a table says who wrote how
    fast, and the last line whether the texts are identical; if not, the exit code is 1. With a KV cache a
    token reads one row of attention and the parts are close; --no-kv-cache shows them apart.
    """
    from generation.sampling import Sampling
    from lab import race as racing
    from model import load

    names = racing.parse_parts(parts)
    set_threads(threads)
    runners = racing.line_up(
        load(model),
        names,
        prompt=prompt,
        engine=None if engine == "auto" else engine,
        simd=simd,
        use_cache=not no_kv_cache,
        sampling=Sampling(temperature, top_k),
        **options,
    )
    notice(f"{model}, {racing.describe(runners, simd, not no_kv_cache)}")
    if not racing.run(runners, prompt, click.echo):
        sys.exit(1)


class Names(click.ParamType):
    """Names separated by commas."""

    name = "list"

    def convert(self, value, parameter, context) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(value.split(","))


@cli.command()
@click.argument("contenders", type=Names(), required=False, metavar="[CONTENDERS]")
@click.option("-N", "lengths", type=Numbers(), default="1024", show_default=True, help="Keys.")
@click.option("-d", "widths", type=Numbers(2**20), default="32", show_default=True, help="Head widths.")
@click.option(
    "-br",
    "--br",
    type=Numbers(auto=True),
    default="auto",
    show_default=True,
    help="Rows of part4's tiles, in queries.",
)
@click.option(
    "-bc",
    "--bc",
    type=Numbers(auto=True),
    default="auto",
    show_default=True,
    help="Columns of part4's tiles, in keys.",
)
@click.option("-t", "--threads", type=Numbers(1024), default="1", show_default=True, help="Threads.")
@click.option(
    "--simd",
    "simds",
    type=Names(),
    default="auto",
    show_default=True,
    help=f"SIMD helpers under parts 1 to 4, of {', '.join(SIMD)}.",
)
@click.option("--mask", "masks", type=Names(), default="none", show_default=True, help="Of none, causal.")
@click.option("--causal", is_flag=True, help="The same as --mask causal.")
@click.option("--queries", type=click.IntRange(1, 2**31 - 1), show_default="as many as keys", help="Queries.")
@click.option("--heads", type=click.IntRange(1, 2**16), default=4, show_default=True, help="Heads.")
@click.option("--batch", type=click.IntRange(1, 2**16), default=1, show_default=True, help="Batch.")
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(2, 10**6),
    default=10,
    show_default=True,
    help="Times that each is timed.",
)
@click.option(
    "--min-time",
    type=click.FloatRange(0, 3600),
    default=0.2,
    show_default=True,
    help="Seconds that each is timed in all, at least.",
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["md", "csv", "json", "jsonl"]),
    default="md",
    show_default=True,
    help="Form of the results.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be measured.")
@click.option("--save", type=click.Path(dir_okay=False), help="Keep the run in this file.")
@click.option(
    "--load",
    "saved",
    type=click.Path(exists=True, dir_okay=False),
    help="Measure nothing; take the run from this file.",
)
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False),
    help="Show what differs from the run in this file by more than chance.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 100),
    default=5,
    show_default=True,
    help="... and by more than so many percent.",
)
@click.option("--fail-on-regression", is_flag=True, help="Exit with 1 if --compare finds one that is slower.")
@click.option("--plot", type=click.Path(file_okay=False), help="Draw the results into this directory.")
@click.option("--tune", is_flag=True, help="Find part4's best tiles and keep them for auto.")
@click.option(
    "--budget",
    type=click.FloatRange(0, 86400, min_open=True),
    default=60,
    show_default=True,
    help="Seconds that --tune takes, for all cases together.",
)
@click.option("--show", is_flag=True, help="With --tune: measure nothing, print what is kept.")
@click.pass_context
def bench(given: click.Context, /, **options) -> None:
    """Time CONTENDERS over a sweep: part0 to part4, sdpa (PyTorch's), onnx (ONNX Runtime's).

    Lists are 32,64 and ranges 1:9+2 or 256:4096*2. Each result is held against float64 before it is timed;
    the contenders of a case are timed in turn. Without CONTENDERS all parts and sdpa take part.
    """
    refuse_options_that_do_nothing(given)
    if options.pop("causal"):
        options["masks"] = ("causal",)
    measure_attention(**options)


def measure_attention(
    *,
    contenders: tuple[str, ...] | None,
    br: tuple[int | None, ...],
    bc: tuple[int | None, ...],
    masks: tuple[str, ...],
    rounds: int,
    min_time: float,
    form: str,
    dry_run: bool,
    save: str | None,
    saved: str | None,
    compare: str | None,
    threshold: float,
    fail_on_regression: bool,
    plot: str | None,
    tune: bool,
    budget: float,
    show: bool,
    **sizes,
) -> None:
    """What bench does, by its options."""
    from lab.bench import report, sweep
    from lab.bench.measure import plan

    if show:
        click.echo(sweep.tuned_text())
        return
    if not set(masks) <= {"none", "causal"}:
        raise click.UsageError(f"--mask is {','.join(masks)!r}; it must be of none, causal")
    tiles = {"br": (None,), "bc": (None,)} if tune else {"br": br, "bc": bc}
    names = ("part4",) if tune else contenders or (*PARTS, "sdpa")
    tiled = any(name in PARTS and PARTS[name].tiled for name in names)
    if not (saved or tiled or (*br, *bc) == (None, None)):
        raise click.UsageError("-br and -bc go with part4 only, which has tiles")
    cells = [] if saved else plan(names, masks=[mask == "causal" for mask in masks], **tiles, **sizes)
    if dry_run:
        click.echo(sweep.plan_text(cells, rounds))
    elif tune:
        sweep.find_tiles(cells, budget, [n for n in br if n], [n for n in bc if n], click.echo)
    else:
        old = report.load(Path(saved)) if saved else None
        if old:
            cells, rounds = [result.cell for result in old.results], old.rounds
        # What is wrong is said before anything is measured.
        out = sweep.Output(cells, rounds, form, save, compare, threshold / 100, plot)
        run, stopped = (old, False) if old else sweep.measure(cells, rounds, min_time)
        slower = out.show(run, click.echo, notice)
        if stopped:
            raise KeyboardInterrupt
        if slower and fail_on_regression:
            sys.exit(1)


# Of bench: options that only one other one gives a meaning, and those that another one leaves without any.
ONLY_WITH = {"show": "tune", "budget": "tune", "fail_on_regression": "compare", "threshold": "compare"}
SIZES = (
    "contenders",
    "lengths",
    "widths",
    "br",
    "bc",
    "threads",
    "simds",
    "masks",
    "causal",
    "queries",
    "heads",
    "batch",
)
NOT_WITH = {
    "compare": ("form", "dry_run"),
    "dry_run": ("save", "plot", "form", "tune"),
    "causal": ("masks",),
    "saved": (*SIZES, "rounds", "min_time", "save", "dry_run", "tune"),
    "tune": ("contenders", "queries", "rounds", "min_time", "form", "save", "compare", "plot"),
}


def refuse_options_that_do_nothing(context: click.Context) -> None:
    """Raise UsageError for an option of bench that would be ignored."""
    given = {
        str(p.name): p.opts[0] if isinstance(p, click.Option) else "CONTENDERS"
        for p in context.command.params
        if context.get_parameter_source(str(p.name)) is click.core.ParameterSource.COMMANDLINE
    }
    for name, needed in ONLY_WITH.items():
        if name in given and needed not in given:
            raise click.UsageError(f"{given[name]} goes with --{needed} only")
    for name, useless in NOT_WITH.items():
        for other in useless:
            if name in given and other in given:
                raise click.UsageError(f"{given[other]} does not go with {given[name]}")


@cli.command()
@click.argument("part", type=click.Choice(list(PARTS)), metavar="PART")
@click.option(
    "-N", "N", type=click.IntRange(1, 2**31 - 1), default=1024, show_default=True, help="Keys, and queries."
)
@click.option("-d", "d", type=click.IntRange(1, 2**20), default=32, show_default=True, help="Head width.")
@click.option(
    "-br",
    "--br",
    type=TileSize(),
    default="auto",
    show_default=True,
    help="Rows of part4's tile, in queries.",
)
@click.option(
    "-bc",
    "--bc",
    type=TileSize(),
    default="auto",
    show_default=True,
    help="Columns of part4's tile, in keys.",
)
@click.option("--causal", is_flag=True, help="With a causal mask.")
@click.option("--heads", type=click.IntRange(1, 2**16), default=4, show_default=True, help="Heads.")
@click.option(
    "-t", "--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads to use."
)
@click.option(
    "--simd",
    type=click.Choice(SIMD),
    default="auto",
    show_default=True,
    help="SIMD helpers under parts 1 to 4.",
)
@click.option(
    "--cachegrind", is_flag=True, help="Simulate the caches too, by valgrind, in some fifty times the time."
)
def explain(
    part: str,
    N: int,
    d: int,
    br: int | str,
    bc: int | str,
    causal: bool,
    heads: int,
    threads: int,
    simd: str,
    cachegrind: bool,
) -> None:
    """Show what PART costs and why: arithmetic, scratch, bytes into each cache, what bounds it, its time.

    The bytes are the algorithm's own count. Where Linux's perf may count cache misses, or with --cachegrind,
    those of one head stand beside it.
    """
    from lab.bench import measure as bench
    from lab.explain import explain as explained

    rows, columns = (size if isinstance(size, int) else None for size in (br, bc))
    cells = bench.plan(
        [part],
        lengths=[N],
        widths=[d],
        masks=[causal],
        heads=heads,
        br=[rows],
        bc=[columns],
        threads=[threads],
        simds=[simd],
    )
    explained(cells[0], click.echo, cachegrind)


@cli.command("profile")
@click.argument("part", type=click.Choice(list(PARTS)), metavar="PART")
@click.option("-m", "--model", default="shakes128", show_default=True, help="Name or path, as for a part.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="What runs the model; auto is native for parts 1 to 4, torch for part0.",
)
@click.option(
    "--simd",
    type=click.Choice(SIMD),
    default="auto",
    show_default=True,
    help="SIMD helpers under parts 1 to 4.",
)
@click.option(
    "-br",
    "--br",
    type=TileSize(),
    default="auto",
    show_default=True,
    help="Rows of part4's tile, in queries.",
)
@click.option(
    "-bc",
    "--bc",
    type=TileSize(),
    default="auto",
    show_default=True,
    help="Columns of part4's tile, in keys.",
)
@click.option(
    "--weights",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Precision of the matrices.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    show_default="half of the block size",
    help="Tokens of the prompt, the model's own text.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    show_default="200, or what the block size leaves",
    help="Tokens to write after it.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["md", "json"]),
    default="md",
    show_default=True,
    help="Form of the table.",
)
@threads_option
def profile_part(
    model: str, engine: str, br: int | str, bc: int | str, form: str, threads: int | None, **options
) -> None:
    """Show where a token's time goes with PART: embedding, QKV, attention, MLP, sampling and so on.

    The prefill of a prompt and the decoding after it are apart. Recording takes time itself; the last lines
    say how much.
    """
    from lab import profile
    from model import load

    set_threads(threads)
    measured = profile.run(
        load(model),
        model=model,
        engine=None if engine == "auto" else engine,
        br=None if br == "auto" else int(br),
        bc=None if bc == "auto" else int(bc),
        **options,
    )
    click.echo(profile.table(measured) if form == "md" else json.dumps(profile.figures(measured)))


@cli.command()
def doctor() -> None:
    """Say what this machine has of what the parts need, and what to do where something is missing.

    A line that begins with -- is about something optional. The exit code is 1 if anything is broken.
    """
    from lab import doctor as examination

    if not examination.run(click.echo):
        sys.exit(1)


def main() -> None:
    """Run the command line; what was wrong with a request is one line on stderr and exit code 2."""
    warnings.showwarning = say_warning  # type: ignore[assignment]  # which needs not all that it is given
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
    notice(f"gpt.py: error: {one_line(message)}")
    sys.exit(2)


def say_warning(message: Warning | str, *_) -> None:
    """One line on stderr, as Python's own two name a line of this code that tells its user nothing."""
    notice(f"gpt.py: warning: {one_line(str(message))}")


def one_line(text: str) -> str:
    """The text as a terminal can show it: names of files and what is in them may hold anything."""
    text = text.replace("\n\t", " ").rstrip()  # click lists a missing argument's choices in lines
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


if __name__ == "__main__":
    main()
