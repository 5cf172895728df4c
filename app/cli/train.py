"""train: learn a text, for some minutes or by the recipe of a shipped model."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from app.cli.options import (
    notice,
    on_command_line,
    program,
    set_threads,
    size_option,
    take,
    threads_option,
    to_type,
)
from attention_ext import BuildError
from attention_ext.parts import with_gradient
from training.recipe import OWN_TEXT, RECIPES, Recipe

SHIPPED = tuple(RECIPES)
OWN_ONLY = ("minutes", "init", "old_corpus", "block_size", "batch_chars")  # options
LONGEST = 100_000  # minutes
LARGEST_BLOCK, LARGEST_BATCH = 2**16, 2**24  # characters


@dataclass(frozen=True)
class TrainOptions:
    """The options of train, as click gives them."""

    name: str
    corpus_file: str | None
    minutes: float | None
    steps: int | None
    init: str | None
    old_corpus: str | None
    block_size: int | None
    batch_chars: int | None
    seed: int | None
    device: str
    part: str | None
    out: str | None
    resume: bool
    overwrite: bool
    quiet: bool


def read_corpus(corpus_file: str | None) -> str:
    """The text of the given file, or of the one that `prepare` wrote."""
    from model import corpus

    if corpus_file is None and not corpus.INPUT.exists():
        raise click.UsageError(
            f"there is no corpus yet; give --corpus FILE or run `{program()} prepare` first"
        )
    return corpus.read(Path(corpus_file) if corpus_file else corpus.INPUT)


@click.command()
@click.argument("name")
@click.option(
    "--corpus", "corpus_file", type=click.Path(), help="Text to learn.", show_default="what prepare got"
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, LONGEST, min_open=True),
    help="Minutes that the run takes.",
    show_default="3",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Train for this many steps instead.",
    show_default="the shipped recipe's",
)
@click.option("--init", help="Model to start from: a shipped name, a directory or ckpt.pt.")
@click.option("--old-corpus", type=click.Path(), help="Measure what --init's model forgets of this text.")
@size_option(
    "--block-size",
    most=LARGEST_BLOCK,
    help="Characters that the model sees.",
    show_default="128, or --init's",
)
@size_option("--batch-chars", most=LARGEST_BATCH, help="Characters of a step.", show_default="2048")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of the random numbers.", show_default="1337"
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device to train on.",
)
@click.option(
    "--part",
    type=click.Choice(with_gradient()),
    help="Attention to train with; part4 has no dropout, and gradients on the CPU only.",
    show_default="part4 where it compiles, part0 for shipped names and CUDA",
)
@click.option(
    "--out", type=click.Path(file_okay=False), help="Directory of the checkpoint.", show_default="out/NAME"
)
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped; give its options again.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint in --out.")
@click.option("--quiet", is_flag=True, help="Print the end and warnings only.")
@threads_option
def train(threads: int | None, **options: Any) -> None:
    """Train a model called NAME on a text for some minutes.

    A shipped NAME (shakes128, shakes256, shakes1024, shakes2048) takes that model's recipe, which takes
    minutes on a GPU and a day on a CPU.
    """
    from attention_ext import processor

    o = take(TrainOptions, options)
    check(o)
    processor.let_waiting_threads_sleep()  # before torch is imported
    directory = Path(o.out or Path("out") / o.name)
    check_directory(directory, o)
    text = read_corpus(o.corpus_file)
    set_threads(threads)
    run_it(o, text, directory)


def check(o: TrainOptions) -> None:
    """Raise UsageError if options do not go together."""
    context = click.get_current_context()
    if not re.fullmatch(r"\w[\w.-]{0,99}", o.name):
        raise click.UsageError(f"NAME is {o.name!r}; it must be letters, digits, '.', '-' and '_'")
    if o.name in SHIPPED:
        for option in OWN_ONLY:
            if on_command_line(context, option):
                flag = "--" + option.replace("_", "-")
                raise click.UsageError(f"{flag} does not go with {o.name}, which has a recipe of its own")
    if o.minutes is not None and math.isnan(o.minutes):
        raise click.UsageError("--minutes is nan; it must be a number")
    if o.minutes is not None and o.steps is not None:
        raise click.UsageError("--minutes does not go with --steps")
    if o.old_corpus is not None and o.init is None:
        raise click.UsageError("--old-corpus goes with --init only")
    if o.resume and o.overwrite:
        raise click.UsageError("--overwrite does not go with --resume")
    if o.device == "cuda" and o.part not in (None, "part0"):
        raise click.UsageError(
            f"{o.part} has no gradient on CUDA; --part {o.part} goes with --device cpu only"
        )


def check_directory(directory: Path, o: TrainOptions) -> None:
    """Raise UsageError if a checkpoint would be replaced without --overwrite.

    Raises ValueError if another process trains there.
    """
    from training.state import FILE, LOCK, only_run

    if (directory / LOCK).is_file():
        with only_run(directory):  # else the next message would call its run stopped
            pass
    if o.resume or o.overwrite:
        return
    stopped = (directory / FILE).is_file()
    if stopped or any((directory / name).is_file() for name in ("model.safetensors", "ckpt.pt")):
        go_on = "--resume to go on, " if stopped else ""
        raise click.UsageError(
            f"{directory} holds a {'run that was stopped' if stopped else 'checkpoint'}; "
            f"give {go_on}--overwrite to replace it, or --out for another directory"
        )


def run_it(o: TrainOptions, text: str, directory: Path) -> None:
    """Train, and print how it ended."""
    from functools import partial

    from app.cli.training_display import watch
    from attention_ext import attention
    from model.checkpoint import load
    from training.run import train as run
    from training.state import FILE

    recipe, start = chosen_recipe(o), None
    if o.init is not None:
        from training.start import recipe_of

        start = load(o.init)
        recipe = recipe_of(recipe, start.model, o.block_size)
    old_text = None if o.old_corpus is None else read_corpus(o.old_corpus)
    part = o.part or default_part(o)
    attend = None if part == "part0" else partial(attention, part, causal=True)
    about = {} if o.name in SHIPPED and part == "part0" else {"part": part}
    about |= {} if o.init is None else {"init": o.init}
    with stoppable() as stop, watch(o.name, o.quiet) as watcher:
        try:
            record = run(
                recipe,
                text,
                o.device,
                directory,
                watcher=watcher,
                attend=attend,
                start=start,
                old_text=old_text,
                resume=o.resume,
                about=about,
                stop=stop,
            )
        except KeyboardInterrupt:
            watcher.close()
            saved = (directory / FILE).is_file()
            notice(f"stopped; to go on: {command_to_resume()}" if saved else "stopped before the first step")
            raise
    print_end(record, directory, text)


def chosen_recipe(o: TrainOptions) -> Recipe:
    """The recipe of the name with what the options change."""
    import dataclasses

    recipe = RECIPES.get(o.name, OWN_TEXT)
    changed: dict[str, Any] = {
        name: value
        for name in ("minutes", "steps", "block_size", "batch_chars", "seed")
        if (value := getattr(o, name)) is not None
    }
    if o.steps is not None and o.name not in RECIPES:
        changed |= {"minutes": None, "eval_every": math.ceil(o.steps / 20)}
    return dataclasses.replace(recipe, **changed)


def default_part(o: TrainOptions) -> str:
    """part4 if it has a gradient here and compiles, else part0. It compiles before the run's time begins."""
    if o.name in SHIPPED or o.device == "cuda":
        return "part0"
    from attention_ext import extension

    try:
        extension.load()
    except BuildError as error:
        notice(f"{program()}: warning: {error}; training with part0")
        return "part0"
    return "part4"


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed or SIGTERM came.

    A second Ctrl-C raises KeyboardInterrupt. A second SIGTERM does nothing: `timeout` sends two at once.
    """
    asked = threading.Event()

    def stop(number: int, frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command_to_resume() -> str:
    """The command that goes on with this one: its own options and --resume."""
    context = click.get_current_context()
    words = ["train", context.params["name"]]
    for option in context.command.params:
        if isinstance(option, click.Option) and option.name and on_command_line(context, option.name):
            value = context.params[option.name]
            words += [option.opts[0]] if option.is_flag else [option.opts[0], str(value)]
    words = [word for word in words if word not in ("--resume", "--overwrite")]
    return f"{to_type()} {shlex.join(words)} --resume"


def print_end(record: dict[str, Any], directory: Path, text: str) -> None:
    """Print the losses, the speed, and how to write text."""
    if "test_loss" in record:
        if "old_loss_before" in record:
            before, after = record["old_loss_before"], record["old_loss_after"]
            click.echo(f"loss on the old corpus: {before:.4f} before, {after:.4f} after")
        click.echo(
            f"validation loss {record['val_loss']:.4f}, test loss {record['test_loss']:.4f} nats per "
            f"character (step {record['best_step']:,}); {record['steps']:,} steps, "
            f"{record['characters_per_second']:,} characters/s, {record['seconds']:.1f} s"
        )
    else:
        best = f"{record['val_loss']:.4f} nats per character, at step {record['best_step']}"
        notice(f"best validation loss {best}")
    # the default prompt is a line end, which a text of one line lacks
    prompt = "" if "\n" in text else f" --prompt {shlex.quote(text[0])}"
    command = f"{to_type()} part4 --inference -m {shlex.quote(str(directory))}{prompt}"
    click.echo(f"wrote {directory}; write text with it: {command}")
