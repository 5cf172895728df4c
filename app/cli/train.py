"""train: learn a text, for some minutes or by the recipe of a shipped model."""

import contextlib
import math
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.draft import make_draft
from shakespeare.app.cli.terminal import notice, program, to_type
from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.parts import Dtype, able
from shakespeare.model.config import POSITIONS, GPTConfig
from shakespeare.training.recipe import OWN_TEXT, RECIPES

MODEL_SIZES = ("n_layer", "n_head", "n_embd")
ENDLESS = ("positions", "window")
# Options that do not go with a shipped recipe.
NOT_WITH_RECIPE = (
    *"minutes init old_corpus rates block_size batch_chars dropout whole_text".split(),
    *MODEL_SIZES,
    *ENDLESS,
)
RATES = ("muon_lr", "adam_lr", "position_lr", "weight_decay")  # fields of Recipe that --rates sets
RATES_HELP = f"Rates of the recipe, of {', '.join(RATES)}."
WINDOW = 256  # characters that a model with --positions alibi sees by default
LONGEST = 100_000  # minutes
TRAINED_SECONDS = 5.0  # in which a new model reads its text for a draft
LARGEST_BLOCK = 2**16  # characters
LARGEST_BATCH = 2**24
MAX_LAYERS = 100
MAX_EMBEDDED = 2**14
PARAMETER_BYTES = 20  # a parameter takes with its gradient, average and two moments
ACTIVATION_BYTES = 80  # the activations of a character take


@dataclass(frozen=True)
class Changes:
    """The values of the options that change a recipe; None leaves it as it is."""

    minutes: float | None
    steps: int | None
    block_size: int | None
    n_layer: int | None
    n_head: int | None
    n_embd: int | None
    dropout: float | None
    positions: str | None
    window: int | None
    batch_chars: int | None
    seed: int | None


@click.command(epilog=f"Shipped names: {', '.join(RECIPES)}.")
@click.argument("name")
@options.path("--corpus", "corpus_file", "Text to learn.", show_default="what prepare got")
@options.number("--minutes", "Minutes that the run takes.", maximum=LONGEST, above=True, show_default="3")
@options.integer("--steps", "Train for this many steps instead.", show_default="the shipped recipe's")
@options.option("--init", "Model to start from: a shipped name, a directory or ckpt.pt.")
@options.path("--old-corpus", "Measure what --init's model forgets of this text.")
@options.size(
    "--block-size", "Characters that the model sees.", maximum=LARGEST_BLOCK, show_default="128, or --init's"
)
@options.size("--n-layer", "Layers.", maximum=MAX_LAYERS, show_default="4, or --init's")
@options.size("--n-head", "Heads of a layer.", maximum=MAX_EMBEDDED, show_default="4, or --init's")
@options.size("--n-embd", "Width of a layer.", maximum=MAX_EMBEDDED, show_default="128, or --init's")
@options.number(
    "--dropout", "Share of dropout; on the CPU by PyTorch's training step.", maximum=0.9, show_default="0"
)
@options.choice(
    "--positions",
    "How the model tells positions apart: by a table as long as a block, or ALiBi, which has no end.",
    choices=POSITIONS,
    default=None,
    show_default="table, or --init's",
)
@options.size(
    "--window", "Characters that it sees with --positions alibi.", maximum=LARGEST_BLOCK, show_default="256"
)
@options.size("--batch-chars", "Characters of a step.", maximum=LARGEST_BATCH, show_default="2048")
@options.option("--rates", RATES_HELP, metavar="NAME=NUMBER,...", show_default="the recipe's")
@options.any_seed(show_default="1337")
@options.choice("--device", "Device to train on.", choices=("cpu", "cuda"))
@options.choice(
    "--part",
    "Attention to train with; part4 does not drop its weights.",
    choices=able(gradient=True),
    default=None,
    show_default="part4 where it compiles, part0 for shipped names and for dropout on the CPU",
)
@options.choice(
    "--dtype", "Numbers of products on CUDA.", choices=("bf16", "fp32"), default=None, show_default="bf16"
)
@options.folder("--out", "Directory of the checkpoint.", show_default="out/NAME")
@options.flag("--whole-text", "Learn all of the text, hold nothing out, and keep the last weights.")
@options.flag("--resume", "Go on with a run that was stopped; give its options again.")
@options.flag("--overwrite", "Replace the checkpoint in --out.")
@options.flag("--quiet", "Print the end and warnings only.")
@options.threads
@options.gathered("changes", Changes)
def train(
    changes: Changes,
    name: str,
    corpus_file: Path | None,
    init: str | None,
    old_corpus: Path | None,
    rates: str | None,
    device: str,
    part: str | None,
    dtype: str | None,
    out: Path | None,
    whole_text: bool,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    threads: int | None,
) -> None:
    """Train a model called NAME on a text for some minutes.

    A shipped NAME takes that model's recipe, which takes minutes on a GPU and a day on a CPU.
    """
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        hint = "; nanoGPT's config files are not read" if name.endswith(".py") else ""
        raise click.UsageError(f"NAME is {name!r}; it must be letters, digits, '.', '-' and '_'{hint}")
    if name in RECIPES:
        options.refuse(NOT_WITH_RECIPE, f"does not go with {name}, which has a recipe of its own")
    options.refuse_combinations(
        {"old_corpus": "init"},
        not_with={
            "steps": ("minutes",),
            "resume": ("overwrite",),
            "init": (*MODEL_SIZES, *ENDLESS, "whole_text"),
        },
    )
    changed = {option: value for option, value in vars(changes).items() if value is not None}
    if changes.positions == "alibi":
        changed.setdefault("window", WINDOW)
    elif changes.window is not None:
        raise click.UsageError("--window goes with --positions alibi only")
    if device == "cpu" and dtype not in (None, "fp32"):
        raise click.UsageError(f"--dtype {dtype} goes with --device cuda only")
    changed.update(parsed_rates(rates))
    if whole_text:
        changed.update(held_out=0.0, test_share=0.0)
    if device == "cpu":  # else PyTorch may not be needed
        options.set_threads(threads)
    directory = out or Path("out") / name
    check_directory(directory, replaces=resume or overwrite)
    text = options.read_corpus(corpus_file)

    from shakespeare.app.cli.train_display import watch
    from shakespeare.model.checkpoint import load
    from shakespeare.model.corpus import alphabet
    from shakespeare.training.run import train as run
    from shakespeare.training.state import FILE

    start = None if init is None else load(init, to_train=True)
    if changes.steps is not None and name not in RECIPES:
        changed.update(minutes=None, eval_every=math.ceil(changes.steps / 20))
    recipe = replace(RECIPES.get(name, OWN_TEXT), **changed)
    if start:
        from shakespeare.training.finetuning import recipe_of

        recipe = recipe_of(recipe, start.model, changes.block_size)
    config = recipe.config(len(alphabet(text)))
    if device == "cpu":
        from shakespeare.lab.machine import check_memory

        activations = ACTIVATION_BYTES * recipe.batch_chars * recipe.n_embd * recipe.n_layer
        needed = PARAMETER_BYTES * config.num_params + activations
        check_memory(f"n_layer={recipe.n_layer} and n_embd={recipe.n_embd}", needed)
    if not set(MODEL_SIZES).isdisjoint(changed) and config.num_params > len(text):
        notice(
            f"the model has {config.num_params:,} parameters, more than the text's {len(text):,} characters: "
            "in a long run it learns the text by heart; --dropout or a smaller model helps"
        )
    part = part or default_part(name, device, recipe.dropout, config, Dtype(dtype or "bf16"))
    facts = {"part": None if name in RECIPES and part == "part0" else part, "dtype": dtype, "init": init}
    old_text = None if old_corpus is None else options.read_corpus(old_corpus)
    try:
        with stoppable() as stops, watch(name, quiet, stops) as watcher:
            record = run(
                recipe,
                text,
                directory,
                device,
                part=part,
                dtype=Dtype(dtype or "bf16"),
                start=start,
                old_text=old_text,
                resume=resume,
                about={option: value for option, value in facts.items() if value is not None},
                watcher=watcher,
            )
    except KeyboardInterrupt:
        saved = (directory / FILE).is_file()
        notice(f"stopped; to go on: {command_to_resume()}" if saved else "stopped before the first step")
        raise
    drafted = make_draft(directory, text, TRAINED_SECONDS)
    if drafted:
        notice(f"wrote {drafted}, which guesses the next tokens")
    print_end(record, directory, text)


def parsed_rates(rates: str | None) -> dict[str, float]:
    """The rates that --rates gives. Raises UsageError for another name and for what is not a number."""
    if rates is None:
        return {}
    with contextlib.suppress(ValueError):
        pairs = (item.split("=") for item in rates.split(","))
        found = {name: float(number) for name, number in pairs}
        if found.keys() <= {*RATES}:
            return found
    must = f"it must be NAME=NUMBER,... with names of {', '.join(RATES)}"
    raise click.UsageError(f"--rates is {rates!r}; {must}")


def check_directory(directory: Path, replaces: bool) -> None:
    """Raise UsageError if a checkpoint is there and `replaces` is False, ValueError if it is in training."""
    from shakespeare.training.state import FILE, LOCK, only_run

    if (directory / LOCK).is_file():
        with only_run(directory):  # else the next message would call its run stopped
            pass
    if replaces:
        return
    stopped = (directory / FILE).is_file()
    if stopped or any((directory / name).is_file() for name in ("model.safetensors", "ckpt.pt")):
        go_on = "--resume to go on, " if stopped else ""
        found = "run that was stopped" if stopped else "checkpoint"
        give = f"give {go_on}--overwrite to replace it, or --out for another directory"
        raise click.UsageError(f"{directory} holds a {found}; {give}")


def default_part(name: str, device: str, dropout: float, config: GPTConfig, dtype: Dtype) -> str:
    """part4 if it has a gradient here and compiles, else part0. It compiles before the run's time begins.

    config, dtype: of a model without biases, and of products on a GPU. Raises BuildError if a GPU is missing.
    """
    if name in RECIPES or dropout and device == "cpu":
        return "part0"
    if device == "cuda":
        from shakespeare.attention_ext.cuda import driver
        from shakespeare.training.cuda.step import takes

        if takes(config, dtype, driver.gpu()):
            return "part4"
        driver.check_gpu()  # else the launcher would be compiled in vain
    try:
        if device == "cuda":
            import_module("shakespeare.attention_ext.cuda.operators")  # compiles the launcher
        else:
            from shakespeare.training.trainer import load_training_step

            load_training_step()
    except BuildError as error:
        notice(f"{program()}: warning: {error}; training with part0")
        return "part0"
    return "part4"


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed or SIGTERM came.

    A second Ctrl-C raises KeyboardInterrupt. A second SIGTERM does nothing: `timeout` sends two at once.
    """
    stopped = False  # no Event: a signal that interrupts its set() would wait for its lock for ever

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        if stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command_to_resume() -> str:
    """The command that goes on with this one: its own options and --resume."""
    context = click.get_current_context()
    words = ["train", context.params["name"]]
    for option in context.command.params:
        if isinstance(option, click.Option) and options.is_given(str(option.name)):
            value = context.params[str(option.name)]
            words += [option.opts[0]] if option.is_flag else [option.opts[0], str(value)]
    words = [word for word in words if word not in ("--resume", "--overwrite")]
    return f"{to_type()} {shlex.join(words)} --resume"


def print_end(record: dict[str, Any], directory: Path, text: str) -> None:
    """Print the losses, the speed, and how to write text."""
    if record["val_loss"] is None:
        speed = f"{record['characters_per_second']:,} characters/s, {record['seconds']:.1f} s"
        click.echo(f"training loss {record['curve'][-1][1]:.4f}; {record['steps']:,} steps, {speed}")
    elif "test_loss" in record:
        if "old_loss_before" in record:
            losses = f"{record['old_loss_before']:.4f} before, {record['old_loss_after']:.4f} after"
            click.echo(f"loss on the old corpus: {losses}")
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
