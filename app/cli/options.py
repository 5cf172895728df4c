"""What several commands share: types of values, options, and settings made before a command starts."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from attention_ext import PARTS, SIMD
from attention_ext.cuda.steps import STEPS
from attention_ext.parts import DEVICES, CachePrecision, Dtype, Precision
from generation.sampling import NUMBERS, Sampling
from lab import saved

LARGEST_SIZE = 2**31 - 1
MOST_THREADS = 1024
WIDEST_HEAD = 2**20
MOST_HEADS = 2**16  # also the most texts in a batch
MOST_NUMBERS = 1000  # in a list: a typing error must not fill the memory


def program() -> str:
    """The name that messages begin with: 'shakespeare', the installed command, or 'gpt.py'."""
    return "shakespeare" if Path(sys.argv[0]).stem == "shakespeare" else "gpt.py"


def to_type() -> str:
    """The first words of a command that the user can copy."""
    return "shakespeare" if program() == "shakespeare" else "python gpt.py"


Options = TypeVar("Options")
Decorator = Callable[[Callable], Callable]


def notice(sentence: str, nl: bool = True) -> None:
    """Print a line on stderr, for the person at the terminal; nothing ends because stderr was closed."""
    try:
        click.echo(sentence, nl=nl, err=True)
    except OSError:  # Python would try to write the rest at its end, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class TileSize(click.ParamType):
    """A whole number of at least 1, or 'auto', which leaves the choice to the kernel."""

    name = "n|auto"

    def convert(self, value, parameter, context) -> int | str:
        return (
            value if value == "auto" else click.IntRange(1, LARGEST_SIZE).convert(value, parameter, context)
        )


class Numbers(click.ParamType):
    """Whole numbers from 1 to `most`: '32,64', '1:8' (by 1), '1:9+2', '256:4096*2'; 'auto' where allowed."""

    name = "list"

    def __init__(self, most: int = LARGEST_SIZE, auto: bool = False) -> None:
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
                self.fail(f"{item!r} must be a number of at least 1, a range like 256:4096*2 or 1:9+2{auto}")
            number, last = int(form[1]), int(form[2] or form[1])
            if number > last:
                self.fail(f"{item!r} goes down; it must go up")
            if last > self.most:
                self.fail(f"{item!r} has {last}; it must be at most {self.most}")
            while number <= last and len(numbers) <= MOST_NUMBERS:
                numbers.append(number)
                number = number * int(form[4]) if form[3] == "*" else number + int(form[4] or 1)
        if len(numbers) > MOST_NUMBERS:
            self.fail(f"{value!r} has more than {MOST_NUMBERS} numbers")
        return tuple(dict.fromkeys(numbers))


class Names(click.ParamType):
    """Names separated by commas."""

    name = "list"

    def convert(self, value, parameter, context) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(value.split(","))


@dataclass(frozen=True)
class EngineOptions:
    """What runs the model: arguments of generation.engine.open_engine(), which chooses where one is None."""

    engine: str | None
    simd: str
    br: int | None
    bc: int | None
    weights: str
    kv_cache: str
    device: str
    step: str | None


@dataclass(frozen=True)
class TextOptions:
    """What is written: the model, the prompt, and how tokens are chosen."""

    model: str
    prompt: str | None
    prompt_file: str | None
    max_new_tokens: int | None
    num_samples: int
    sampling: Sampling
    stop: tuple[str, ...]
    seed: int
    context: str
    no_kv_cache: bool


def take(kind: type[Options], options: dict[str, Any]) -> Options:
    """Make an object of a dataclass from click's options; its fields are removed from them."""
    return kind(**{field.name: options.pop(field.name) for field in fields(kind)})  # type: ignore[arg-type]


def sampling_option(name: str) -> Decorator:
    """The option of a setting of Sampling."""
    known = NUMBERS[name]
    kind: Any = click.IntRange if known.whole else click.FloatRange
    most = None if known.most == math.inf else known.most
    return click.option(
        f"--{name.replace('_', '-')}",
        type=kind(known.least, most, min_open=known.above),
        default=known.default,
        show_default=True,
        help=known.help,
    )


def take_sampling(options: dict[str, Any]) -> Sampling:
    """Make a Sampling from click's options; its settings are removed from them."""
    return Sampling(**{name: options.pop(name) for name in NUMBERS})


def save_option(kind: str, what: str) -> Decorator:
    """--save [FILE]; without FILE it is the file for this processor's results of a kind.

    With --device cuda it is the GPU's file.
    """

    def default(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value != "":
            return value
        if context.params.get("device") == "cuda":
            from lab.cuda import gpu

            return str(saved.default_file(f"{kind}_cuda", gpu.slug()))
        return str(saved.default_file(kind))

    return click.option(
        "--save",
        is_flag=False,
        flag_value="",  # the callback's value for --save without FILE
        type=click.Path(dir_okay=False),
        metavar="[FILE]",
        callback=default,
        help=f"Save {what} to FILE; without FILE, to this processor's or GPU's in benchmarks/results/.",
    )


def none_if_auto(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A callback that turns 'auto' into None."""
    return None if value == "auto" else value


def all_of(*options: Decorator) -> Decorator:
    """One decorator that adds these options in this order."""

    def add(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def size_option(*names: str, default: int | None = None, most: int = LARGEST_SIZE, **settings) -> Decorator:
    """A whole number from 1 to `most`; its default is shown."""
    settings = {"show_default": True} | settings
    return click.option(*names, type=click.IntRange(1, most), default=default, **settings)


def tile_options(shown: str | None = None) -> Decorator:
    """-br and -bc; None stands for 'auto', or for 'not given' if `shown` describes the default."""
    settings: dict[str, Any] = {"type": TileSize()}
    settings |= {"show_default": shown or True}
    if shown is None:
        settings |= {"default": "auto", "callback": none_if_auto}
    return all_of(
        click.option("-br", "--br", help="Rows of part4's tile, in queries.", **settings),
        click.option("-bc", "--bc", help="Columns of part4's tile, in keys.", **settings),
    )


def warned_of_threads(context, parameter, value):
    """The value of --threads. Prints a warning if it is more than the cores."""
    from attention_ext.processor import cores

    most = max(value) if isinstance(value, tuple) else value or 1
    if most > cores():
        notice(f"{program()}: warning: --threads is {most}; this process may use {cores()} cores")
    return value


threads_option = size_option(
    "--threads",
    most=MOST_THREADS,
    help="Most threads to use; a text takes the fastest number of them.",
    show_default="all cores",
    callback=warned_of_threads,
)
one_thread_option = size_option(
    "-t", "--threads", default=1, most=MOST_THREADS, help="Threads to use.", callback=warned_of_threads
)
simd_option = click.option(
    "--simd",
    type=click.Choice(SIMD),
    default="auto",
    show_default=True,
    help="SIMD helpers of attention's forward pass: auto is portable, off is scalar loops.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice([dtype.value for dtype in Dtype]),
    default=Dtype.FP32.value,
    show_default=True,
    help="Format of the inputs and the output.",
)
device_option = click.option(
    "--device",
    type=click.Choice(list(DEVICES)),
    default="cpu",
    is_eager=True,  # the defaults of other options depend on it
    show_default=True,
    help="Device of the attention; cuda is an NVIDIA GPU, for part0 and part4.",
)
step_option = click.option(
    "--step",
    type=click.Choice(list(STEPS)),
    help="Part4's kernel on CUDA; by default the fastest that accepts the inputs.",
)
# Options of one device only, by the names of the commands' parameters.
ONE_DEVICE = {
    "cpu": ("br", "bc", "threads", "simd", "simds", "cachegrind", "tune", "budget", "show"),
    "cuda": ("step", "arch", "cuda_queries", "l2s"),
}
weights_option = click.option(
    "--weights",
    type=click.Choice([precision.value for precision in Precision]),
    default=Precision.FP32.value,
    show_default=True,
    help="Precision of the matrices; bf16 halves the bytes of weights read for a token, int8 quarters them.",
)
kv_cache_option = click.option(
    "--kv-cache",
    type=click.Choice([precision.value for precision in CachePrecision]),
    default=CachePrecision.FP32.value,
    show_default=True,
    help="Precision of the cached keys and values; bf16 halves their bytes.",
)
engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "native", "torch"]),
    default="auto",
    show_default=True,
    callback=none_if_auto,
    help="Engine that runs the model; auto is native for parts 1 to 4, and torch, the only one, for part0.",
)
model_option = click.option(
    "-m",
    "--model",
    default="shakes128",
    show_default=True,
    help="Model: shakes128, shakes256, shakes1024, shakes2048, a directory or ckpt.pt.",
)
seed_option = click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=1337,
    show_default=True,
    help="Seed of the random numbers.",
)
number_options = all_of(*map(sampling_option, NUMBERS))  # take_sampling() takes them
part_argument = click.argument("part", type=click.Choice(list(PARTS)), metavar="PART")


def on_command_line(context: click.Context, name: str) -> bool:
    """Whether a parameter was given by the user."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse_options_of_the_other_device() -> None:
    """Raise UsageError if the current command was given an option that does not go with its --device."""
    context = click.get_current_context()
    for device, names in ONE_DEVICE.items():
        for option in context.command.params:
            if option.name not in names or context.params["device"] == device:
                continue
            if not on_command_line(context, option.name):
                continue
            if device == "cuda":
                raise click.UsageError(f"{option.opts[0]} goes with --device cuda only")
            reason = ": each step has its own tile" if option.name in ("br", "bc") else ""
            raise click.UsageError(f"{option.opts[0]} does not go with --device cuda{reason}")


def set_threads(threads: int | None) -> None:
    """Set the threads of PyTorch and of the kernels. None takes PyTorch's default, at most the cores."""
    import torch

    from attention_ext import processor

    torch.set_num_threads(threads or min(torch.get_num_threads(), processor.cores()))
