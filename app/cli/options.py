"""What several commands share: types of values, options, and settings made before a command starts."""

import functools
import importlib
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shakespeare.app.cli.terminal import notice, one_line, program
from shakespeare.attention_ext import PARTS, SIMD
from shakespeare.attention_ext.build.structs import CSRC, constants
from shakespeare.attention_ext.checks import made as made
from shakespeare.attention_ext.cuda.kernels import EVERY, KERNELS
from shakespeare.attention_ext.parts import DEVICES, CachePrecision, Dtype, Precision, compatible, is_file
from shakespeare.checkpoints import DEFAULT, PRESENT
from shakespeare.generation.sampling import LARGEST_SEED, RANDOM, SETTINGS, Sampling, drawn_seed
from shakespeare.lab import result_files

if TYPE_CHECKING:
    from shakespeare.generation.request import Request
    from shakespeare.model.checkpoint import Checkpoint
    from shakespeare.model.tokenizer import Tokenizer

ESCAPE = re.compile(r"\\[nrt]")
SHELL = "; in a shell $'\\n' is a line end"
LARGEST_SIZE = 2**31 - 1
MAX_THREADS = constants(CSRC / "attention.h")["MOST_THREADS"]
WIDEST_HEAD = 2**20
MAX_HEADS = 2**16  # also the most in a batch
# Modules of the GPU that a measurement runs on; they import torch.
GPUS = {"cuda": "shakespeare.lab.cuda.device", "webgpu": "shakespeare.lab.webgpu.device"}
MAX_NUMBERS = 1000  # in a list: a typing error must not fill the memory

Decorator = Callable[[Callable], Callable]


class Number(click.FloatRange):
    """A number in a range. NaN, which click admits to every range, is refused."""

    def convert(self, value, parameter, context) -> float:
        number = super().convert(value, parameter, context)
        if math.isnan(number):
            self.fail(f"{value} is no number", parameter, context)
        return number


class Directory(click.Path):
    """A directory's path. The empty path, which an unset variable gives, is refused."""

    def convert(self, value, parameter, context):
        if value == "":
            self.fail("'' is no directory; '.' is this one")
        return super().convert(value, parameter, context)


class Kernel(click.Choice):
    """A name of KERNELS, or of WebGPU's STEPS. --device is known by then, because it is eager."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ctx and ctx.params.get("device") == "webgpu":
            from shakespeare.attention_ext.webgpu.steps import STEPS  # imports NumPy

            return click.Choice(list(STEPS)).convert(value, param, ctx)
        return super().convert(value, param, ctx)


class TileSize(click.ParamType):
    """A whole number of at least 1, or 'auto', which gives None: the kernel chooses."""

    name = "n|auto"

    def convert(self, value, parameter, context) -> int | None:
        if str(value).lower() == "auto":  # --help shows it in capitals
            return None
        return click.IntRange(1, LARGEST_SIZE).convert(value, parameter, context)


class Numbers(click.ParamType):
    """Whole numbers up to `maximum`: '32,64', '1:8' (by 1), '1:9+2', '256:4096*2'; 'auto' where allowed."""

    name = "list"

    def __init__(self, maximum: int = LARGEST_SIZE, auto: bool = False) -> None:
        self.maximum = maximum
        self.auto = auto

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
                auto = " or auto" if self.auto else ""
                self.fail(f"{item!r} must be a number of at least 1, a range like 256:4096*2 or 1:9+2{auto}")
            number = int(form[1])
            last = int(form[2] or number)
            if number > last:
                self.fail(f"{item!r} goes down; it must go up")
            if last > self.maximum:
                self.fail(f"{item!r} has {last}; it must be at most {self.maximum}")
            while number <= last and len(numbers) <= MAX_NUMBERS:
                numbers.append(number)
                number = number * int(form[4]) if form[3] == "*" else number + int(form[4] or 1)
        if len(numbers) > MAX_NUMBERS:
            self.fail(f"{value!r} has more than {MAX_NUMBERS} numbers")
        return tuple(dict.fromkeys(numbers))


class PartOrFile(click.Choice):
    """A name of PARTS, or the path of a user's kernel."""

    def __init__(self) -> None:
        super().__init__(list(PARTS))

    def convert(self, value, parameter, context) -> str:
        return value if is_file(value) else super().convert(value, parameter, context)


class Names(click.ParamType):
    """Names separated by commas, each one of `choices`, if there are any. files: also users' kernels."""

    name = "list"

    def __init__(self, choices: Collection[str] = (), files: bool = False) -> None:
        self.choices = choices
        self.files = files

    def convert(self, value, parameter, context) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(value.split(",") if value else ())
        known = [*self.choices, *(name for name in names if self.files and is_file(name))]
        wrong = [name for name in names if self.choices and name not in known]
        if wrong:
            self.fail(f"{wrong[0]!r} must be one of {', '.join(self.choices)}", parameter, context)
        return names


def is_given(name: str) -> bool:
    """Whether the user gave this parameter of the current command."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse(names: Collection[str], why: str) -> None:
    """Raise UsageError, '--option why', if the user gave one of these parameters of the current command."""
    for parameter in click.get_current_context().command.params:
        if parameter.name in names and is_given(parameter.name):
            option = isinstance(parameter, click.Option)
            raise click.UsageError(f"{parameter.opts[0] if option else parameter.name.upper()} {why}")


def refuse_others(names: Collection[str], why: str) -> None:
    """Raise UsageError as refuse() does, for the parameters that are not among these."""
    refuse(click.get_current_context().params.keys() - names, why)


def refuse_combinations(
    only_with: Mapping[str, str] = {}, not_with: Mapping[str, Collection[str]] = {}
) -> None:
    """Raise UsageError for options that the given ones make useless, by the parameters' names.

    only_with: the option that each one needs. not_with: the options that each one excludes.
    """
    for name, needed in only_with.items():
        if not is_given(needed):
            refuse((name,), f"goes with --{needed} only")
    for name, useless in not_with.items():
        if is_given(name):
            refuse(useless, f"does not go with --{name.replace('_', '-')}")


def all_of(*options: Decorator) -> Decorator:
    """One decorator that adds these options in this order."""

    def add(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def gathered(name: str, make: Callable, parameters: Iterable[str] = ()) -> Decorator:
    """Let a command take these parameters, by default a dataclass's fields, as one: what make() gives."""
    names = tuple(parameters) or [field.name for field in fields(make)]  # type: ignore[arg-type]

    def add(command: Callable) -> Callable:
        @functools.wraps(command)
        def call(**values):
            return command(**{name: make(**{each: values.pop(each) for each in names})}, **values)

        return call

    return add


def option(*words: str, **settings) -> Decorator:
    """click.option(); the last word is the help."""
    *names, help = words
    return click.option(*names, help=help, **settings)


def numbers(*words: str, maximum: int = LARGEST_SIZE, auto: bool = False, **settings) -> Decorator:
    """A list of Numbers."""
    return option(*words, type=Numbers(maximum, auto), **settings)


def names(*words: str, choices: Collection[str] = (), **settings) -> Decorator:
    """A list of Names."""
    return option(*words, type=Names(choices), **settings)


def integer(*words: str, minimum: int = 1, maximum: int | None = None, **settings) -> Decorator:
    """A whole number from `minimum` to `maximum`."""
    return option(*words, type=click.IntRange(minimum, maximum), **settings)


def number(*words: str, maximum: float, minimum: float = 0, above: bool = False, **settings) -> Decorator:
    """A number from `minimum` to `maximum`. above: without `minimum` itself."""
    return option(*words, type=Number(minimum, maximum, min_open=above), **settings)


def choice(*words: str, choices: Iterable[str], **settings) -> Decorator:
    """One of these words, by default the first."""
    known = [str(word) for word in choices]
    return option(*words, type=click.Choice(known), **({"default": known[0]} | settings))


def file(*words: str, exists: bool = False, **settings) -> Decorator:
    """The path of a file."""
    return option(*words, type=click.Path(exists, dir_okay=False, path_type=Path), **settings)


flag = partial(option, is_flag=True)
size = partial(integer, maximum=LARGEST_SIZE)  # it fits 31 bits
path = partial(option, type=click.Path(path_type=Path))  # a file, or - for standard input
folder = partial(option, type=Directory(file_okay=False, path_type=Path))


def save(command: str, what: str) -> Decorator:
    """--save [FILE]; without FILE the one for this processor's results of a command, or for the GPU's."""

    def default(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value != "":
            return value
        device = context.params.get("device", "cpu")
        if device == "cpu":
            return str(result_files.default_file(command))
        module = importlib.import_module(GPUS[device])
        return str(result_files.default_file(f"{command}_{device}", module.Gpu().describe()["name"]))

    help = f"Save {what} to FILE; without FILE, to this processor's or GPU's in benchmarks/results/."
    alone = {"is_flag": False, "flag_value": ""}  # the callback's value for --save without FILE
    file = click.Path(dir_okay=False)
    return option("--save", help, type=file, metavar="[FILE]", callback=default, **alone)


def warn_of_threads(context, parameter, value):
    """The value of --threads. Prints a warning if it is more than the cores."""
    from shakespeare.attention_ext.processor import cores

    count = max(value) if isinstance(value, tuple) else value or 1
    if count > cores():
        notice(f"{program()}: warning: --threads is {count}; this process may use {cores()} cores")
    return value


def threads_for(threads: int | None) -> int:
    """The threads of an engine; None takes all cores. PyTorch's, if it is imported later, then sleep."""
    from shakespeare.attention_ext import processor

    processor.let_waiting_threads_sleep()
    return threads or processor.threads()


def set_threads(threads: int | None, sleeping: bool = True) -> int:
    """Set and return the threads of PyTorch and of the kernels; None takes PyTorch's, at most the cores.

    sleeping: threads that wait sleep, see let_waiting_threads_sleep().
    """
    from shakespeare.attention_ext import processor

    if sleeping:
        processor.let_waiting_threads_sleep()
    import torch

    count = threads or min(torch.get_num_threads(), processor.cores())
    torch.set_num_threads(count)
    return count


BOUNDED: dict[str, Any] = {"maximum": MAX_THREADS, "callback": warn_of_threads}
MAX_THREADS_HELP = "Most threads to use; a text takes the fastest number of them."
threads = size("--threads", MAX_THREADS_HELP, show_default="all cores", **BOUNDED)
one_thread = size("-t", "--threads", "Threads to use.", default=1, **BOUNDED)
some_threads = numbers("-t", "--threads", "Numbers of threads.", default="1", **BOUNDED)

# A call of attention, and where and how it is computed.
batch: Callable = partial(size, "-B", "--batch", "Batch size.", maximum=MAX_HEADS)
heads: Callable = partial(size, "--heads", "Number of heads.", maximum=MAX_HEADS)
width = size("-d", "d", "Head width.", maximum=WIDEST_HEAD, default=32)
causal = flag("--causal", "Use a causal mask.")
part = click.argument("part", type=PartOrFile(), metavar="PART")
HELPERS = "SIMD helpers of attention's forward pass"
simd = choice("--simd", f"{HELPERS}: auto is portable, off is scalar loops.", choices=SIMD)
simds = names("--simd", "simds", f"{HELPERS}, from {', '.join(SIMD)}.", choices=SIMD, default="auto")
dtype = choice("--dtype", "Format of the inputs and the output.", choices=Dtype)
_device: Callable = partial(choice, "--device", is_eager=True)  # the defaults of other options depend on it
DEVICE = "Device of the attention; cuda is an NVIDIA GPU, for part0 and part4"
device = _device(f"{DEVICE}; webgpu any GPU, for part4.", choices=DEVICES)
cpu_or_cuda = _device(f"{DEVICE}.", choices=("cpu", "cuda"))
FASTEST = "by default the fastest that accepts the inputs"
KERNEL = f"Part4's kernel on CUDA, or its step 1 to 6 on WebGPU; {FASTEST}."
kernel = option("--kernel", KERNEL, type=Kernel(list(KERNELS)))
with_backward = option("--kernel", KERNEL, type=Kernel(list(EVERY)))
# Options of one device only, by the names of the commands' parameters.
CPU_ONLY = ("br", "bc", "threads", "simds", "cachegrind", "tune", "budget", "show")
CUDA_ONLY = ("arch", "cuda_queries", "gpus", "l2s")


@dataclass(frozen=True)
class CallOptions:
    """The values of the options of a call of attention."""

    batch: int
    heads: int
    N: int
    d: int
    br: int | None
    bc: int | None
    causal: bool
    rules: str
    simd: str
    dtype: str
    device: str
    kernel: str | None


RULES = ("window", "softcap", "alibi", "sinks", "documents")


def rules_text(**rules) -> str:
    """The rules as `bench --rules` and lab.rule_options name them: 'window=255+alibi', or 'none'."""
    words = (name if value is True else f"{name}={value}" for name, value in rules.items() if value)
    return "+".join(words) or "none"


rules = all_of(
    size("--window", "Keys to each side of a query that it sees.", default=None),
    number("--softcap", "Bound of the scores, by tanh.", maximum=1e6, above=True, default=None),
    flag("--alibi", "Subtract a slope for each head times the distance of a key."),
    flag("--sinks", "Add a logit of 0 for each head to the softmax."),
    size("--documents", "Keys of a document; a query sees its own only.", default=None),
    gathered("rules", rules_text, RULES),
)


def tiles(**settings) -> Decorator:
    """-br and -bc; None stands for 'auto'."""
    return all_of(
        click.option("-br", "--br", type=TileSize(), help="Rows of part4's tile, in queries.", **settings),
        click.option("-bc", "--bc", type=TileSize(), help="Columns of part4's tile, in keys.", **settings),
    )


def check(part: str | None = None) -> None:
    """Raise UsageError for options of the current command that do not go with its part and --device.

    part: by default the command's own. bench has none, and checks each contender.
    """
    values = click.get_current_context().params
    device = values["device"]
    part = part or values.get("part")
    names = ("kernel", "simd", "dtype", "br", "bc") if part else ("kernel", "simd")
    named = {name: values[name] for name in names if is_given(name)}
    gradient = bool(part and values.get("backward"))
    reason = compatible(part or "part4", device, gradient=gradient, **named)
    if reason:
        raise click.UsageError(reason)
    if device != "cpu":
        refuse(CPU_ONLY, f"does not go with --device {device}")
    if device != "cuda":
        refuse(CUDA_ONLY, "goes with --device cuda only")


# What runs the model.
MODEL = f"Model: {', '.join(PRESENT)}, a directory, ckpt.pt or FILE.gguf"
model = option("-m", "--model", f"{MODEL}.", default=DEFAULT)
engine = choice(
    "--engine",
    "Engine that runs the model; auto is native for parts 1 to 4, for part4 also cuda or webgpu, else torch.",
    choices=("auto", "native", "torch", "cuda", "webgpu"),
    callback=lambda context, parameter, value: None if value == "auto" else value,
)
MATRICES = "Precision of the matrices; bf16 halves the bytes of weights read for a token"
weights = choice("--weights", f"{MATRICES}, int8 quarters them.", choices=Precision)
CACHED = "Precision of the cached keys and values; bf16 halves part4's bytes."
kv_cache = choice("--kv-cache", CACHED, choices=CachePrecision)
DRAFTS = "the model's draft, nothing, or the draft of a model or in a file. It changes no text."
DRAFT = f"What guesses the next tokens of few texts in the native and the cuda engine: {DRAFTS}"
draft = option("--draft", DRAFT, default="auto", metavar="auto|off|NAME")

# What is written.
prompt = all_of(
    option("--prompt", "Text to continue.", show_default="a line end"),
    path("--prompt-file", "File to continue, - for standard input."),
    integer(
        "--max-new-tokens",
        "Tokens to write per sample; -1 is the default.",
        minimum=-1,
        show_default="the model's block size",
        callback=lambda context, parameter, value: None if value == -1 else value,
    ),
)
SECRET_SEED = "SHAKESPEARE_COURSE_SEED"  # a variable of the environment


def secret_seed(seed: int | None) -> int | None:
    """This seed, or the environment's, which is then removed: a user's file must not find it there."""
    secret = os.environ.pop(SECRET_SEED, None)
    if seed is not None or secret is None:
        return seed
    if not re.fullmatch(r"\d{1,18}", secret, re.ASCII):
        raise ValueError(f"{SECRET_SEED} is not a whole number of at most 18 digits")  # nor shown
    return int(secret)


def drawn(context, parameter, value):
    """The value of --seed; for -1 a random one, which is printed."""
    if value != RANDOM:
        return value
    seed = drawn_seed(RANDOM)
    notice(f"--seed {seed}")
    return seed


SEED = "Seed of the random numbers; -1 draws one."
any_seed: Callable = partial(integer, "--seed", SEED, minimum=RANDOM, maximum=LARGEST_SEED, callback=drawn)
seed = any_seed(default=1337)
no_kv_cache = flag("--no-kv-cache", "Recompute the whole window for each token.")


def sampling_option(name: str) -> Decorator:
    """The option of a setting of Sampling."""
    known = SETTINGS[name]
    number_type: Any = click.IntRange if known.integral else click.FloatRange
    bounds = number_type(
        known.minimum, None if known.maximum == math.inf else known.maximum, min_open=known.above
    )
    return option(f"--{name.replace('_', '-')}", known.help, type=bounds, default=known.default)


sampling = all_of(*map(sampling_option, SETTINGS), gathered("sampling", Sampling, SETTINGS))
CONTEXT = "Past the block size: slide the window, or restart it with its last half."


def text_options(seed: Decorator = seed) -> Decorator:
    """The options of a text, with this --seed."""
    stop = option("--stop", "End a sample before this text; may be repeated.", multiple=True)
    ignore_eos = flag("--ignore-eos", "Write on after a token that ends a text.")
    return all_of(
        stop, seed, ignore_eos, choice("--context", CONTEXT, choices=("slide", "reset")), no_kv_cache
    )


@dataclass(frozen=True)
class TextOptions:
    """The values of the options of the model, its engine, and the text that it writes."""

    model: str
    engine: str | None
    weights: str
    kv_cache: str
    prompt: str | None
    prompt_file: Path | None
    max_new_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    seed: int
    context: str
    ignore_eos: bool
    no_kv_cache: bool


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """The value of --prompt, or the text of --prompt-file, or of standard input for '-'."""
    if file is None:
        return prompt
    if prompt is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other")
    from shakespeare.model import corpus

    if str(file) != "-":
        return corpus.decode(file.read_bytes(), str(file))
    if sys.stdin is None:
        raise click.UsageError("--prompt-file is -, but standard input is closed")
    return corpus.decode(sys.stdin.buffer.read(), "standard input")


def encoded(tokenizer: "Tokenizer", prompt: str) -> list[int]:
    """The ids of a prompt. Raises ValueError with a hint if --prompt is meant otherwise than it is taken."""
    shown = prompt if is_given("prompt") else ""
    hint = SHELL if ESCAPE.search(shown) else ""
    if shown.startswith("FILE:"):  # nanoGPT's --start
        hint = f"; --prompt-file {shlex.quote(shown.removeprefix('FILE:'))} continues a file"
    try:
        ids = tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from None
    if shown.startswith("FILE:"):
        notice(f"{program()}: warning: --prompt is taken as it is{one_line(hint)}")
    return ids


def warn_of_stops(tokenizer: "Tokenizer", stops: Iterable[str]) -> None:
    """Print a warning for each --stop with characters that the model cannot write."""
    for stop in stops:
        try:
            tokenizer.encode(stop)
        except ValueError as error:
            hint = SHELL if ESCAPE.search(stop) else ""
            notice(f"{program()}: warning: --stop {one_line(stop)} ends no text: {error}{hint}")


def first_request(chosen: TextOptions, checkpoint: "Checkpoint", prompt: str) -> "Request":
    """The first text's request. Warns of stops as warn_of_stops(), raises ValueError as encoded()."""
    from shakespeare.generation.request import Request

    warn_of_stops(checkpoint.tokenizer, chosen.stop)
    length = chosen.max_new_tokens
    return made(
        Request,
        chosen,
        ids=tuple(encoded(checkpoint.tokenizer, prompt)),
        use_cache=not chosen.no_kv_cache,
        max_new_tokens=checkpoint.config.block_size if length is None else length,
    )


def read_corpus(file: Path | None) -> str:
    """The text of the given file, or of the one that `prepare` wrote."""
    from shakespeare.model import corpus

    if file is None and not corpus.INPUT.exists():
        remedy = f"give --corpus FILE or run `{program()} prepare` first"
        raise click.UsageError(f"there is no corpus yet; {remedy}")
    return corpus.read(file or corpus.INPUT)
