"""The command line: parse, call, print; no maths. A command imports what it needs when it runs."""

import gc
import importlib
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Collection
from typing import Any

import click

from shakespeare import __version__
from shakespeare.app.cli import nanogpt
from shakespeare.app.cli.terminal import NOTICES, notice, one_line, program
from shakespeare.attention_ext import PARTS, BuildError
from shakespeare.attention_ext.build import prebuilt
from shakespeare.attention_ext.parts import is_file

# The sections of `gpt.py --help`: (what to type, the sentence that describes it).
WRITE = [(f"{name} --inference", f"Write text with {name}: {part.summary}.") for name, part in PARTS.items()]
SECTIONS: dict[str, tuple[str, ...]] = {
    "Write many texts": ("bulk",),
    "Serve": ("serve",),
    "Lab test": (*PARTS, "4Daccess", "parallel"),
    "Your own attention": ("try", "course"),
    "Measure": ("bench", "explain", "profile", "race", "doctor"),
    "Train": ("prepare", "train", "draft", "eval", "export"),
    "Show": ("web",),
}
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
MODULES = {"4Daccess": "four_d_access", "try": "try_"}  # commands whose names no module can have
# What a plain install lacks and some commands need.
NEEDED = {
    **{name: f"{name}: pip install {name}" for name in ("pooch", "rich", "gguf")},
    "torch": "PyTorch: pip install torch pybind11",
    **{name: f"{name}: pip install -e '.[cluster]'" for name in ("pyarrow", "ray")},
    **dict.fromkeys(("fcntl", "grp", "pwd", "resource"), "Linux or a Mac; on Windows use WSL"),
}
# Words of the errors when memory runs out: PyTorch's, the kernels', a thread's that cannot be started.
NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "new thread",
    "map segment",
    "bad_alloc",
)
APART = "ATTENTION_APART"  # set in the process that runs a user's kernel
CTRL_C_SECONDS = 2  # until a process that does not end at Ctrl-C is killed
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


class Commands(click.Group):
    """A group whose help shows its commands in sections. A command's file is imported when it is needed."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        options = {"-h", *(word for option in self.params for word in option.opts), "--help"}
        at = next((i for i, word in enumerate(args) if word not in options), len(args))
        if at < len(args) and args[at].startswith("-"):
            args = [*args[:at], "part4", "--inference", *args[at:]]
        return super().parse_args(context, args)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        folder, _, word = args[0].rpartition("/")
        hint = nanogpt.hint("command", "config/" if folder == "config" else word)
        if hint:
            raise click.UsageError(hint)
        name, command, rest = super().resolve_command(context, args)
        known = {word for parameter in command.params for word in parameter.opts} if command else set()
        return name, command, [hyphened(word, known) for word in rest]

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return command_of(name) if name in COMMANDS else None

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {"Write": WRITE}
        for heading, names in SECTIONS.items():
            rows[heading] = [(name, first_sentence(command_of(name))) for name in names]
        width = max(len(name) for section in rows.values() for name, _ in section)
        for heading, section in rows.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), sentence) for name, sentence in section])


def command_of(name: str) -> click.Command:
    """The command of one of SECTIONS' names."""
    if name in PARTS:
        from shakespeare.app.cli import part

        return part.command_of(name)
    module = importlib.import_module(f"shakespeare.app.cli.{MODULES.get(name, name)}")
    commands = (found for found in vars(module).values() if isinstance(found, click.Command))
    return next(command for command in commands if command.name == name)


def hyphened(word: str, known: Collection[str]) -> str:
    """--top_k=5 and -top_k=5 as --top-k=5, if --top-k is known or nanoGPT's; any other word as it is."""
    name, *value = word.split("=", 1)
    meant = "--" + name.lstrip("-").replace("_", "-")
    known_too = meant in known or "--" + meant[2:].replace("-", "_") in nanogpt.WORDS
    return "=".join([meant, *value]) if name[:1] == "-" and name not in known and known_too else word


def first_sentence(command: click.Command) -> str:
    """The whole sentence; click would cut it to a line."""
    sentence = command.get_short_help_str(limit=10_000)
    return sentence if sentence.endswith(".") else f"{sentence}."


@click.group(cls=Commands, context_settings=SETTINGS)
@click.option("--compile", "compiled", is_flag=True, help="Compile for this processor, also from a wheel.")
@click.version_option(__version__, message="shakespeare-attention %(version)s")
def cli(compiled: bool) -> None:
    """Write Shakespeare with a small GPT whose attention you choose, and measure each choice.

    part0 is PyTorch, part1 naive, part2 blocked, part3 fused, part4 flash. Options without a command are
    those of part4 --inference.
    """
    if compiled:
        os.environ[prebuilt.COMPILE] = "1"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with these arguments; None takes those of the process.

    A command that returns False gives exit code 1, a wrong request one line on stderr and exit code 2.
    """
    if os.getpid() == 1:  # the process of a container: a signal ends it only by a handler
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Modules are no garbage; looking for some in them took 0.7 s of part4's test on a Zen 3.
    gc.set_threshold(50_000)
    # Kineto writes a line to stderr at each start and stop of the profiler unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    logger = logging.getLogger("shakespeare")
    logger.addHandler(NOTICES)
    logger.propagate = False  # a handler of the root logger would show each line again
    warnings.showwarning = show_warning  # type: ignore[assignment]  # it takes fewer arguments
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):  # a notebook's have none
            stream.reconfigure(errors="backslashreplace")  # as Python's stderr: no character is lost
    if arguments is None:
        arguments = sys.argv[1:]
        file = named_file(arguments)
        if file:
            run_apart(file)
    try:
        with cli.make_context(program(), list(arguments)) as context:
            if cli.invoke(context) is False:
                sys.exit(1)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.NoSuchOption as error:
        fail(nanogpt.hint("option", error.option_name) or error.format_message())
    except click.ClickException as error:
        fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        notice("")
        sys.exit(130)
    except BrokenPipeError:  # stdout was closed by its reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, BuildError) as error:
        notice(getattr(error, "output", ""), nl=False)
        fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        fail(f"this command needs {NEEDED[error.name]}")
    except (MemoryError, RuntimeError, ImportError) as error:
        lines = str(error).splitlines() or ["too much was asked for"]
        if not isinstance(error, MemoryError) and not any(words in lines[0] for words in NO_MEMORY):
            raise
        fail(f"memory does not suffice: {lines[0]}")


def named_file(words: list[str]) -> str | None:
    """The user's kernel that a command runs in its own process; None without one."""
    elsewhere = words[:1] == ["course"] or words[:1] == ["try"] and "--inference" not in words
    if os.environ.get(APART) or elsewhere:
        return None
    names = (name for word in words for name in word.split(","))
    return next((name for name in names if is_file(name)), None)


def run_apart(file: str) -> None:
    """Run this command in another process and exit as it does: a user's kernel may crash."""
    import subprocess

    command = [sys.executable, *sys.orig_argv[1:]]
    with subprocess.Popen(command, env=os.environ | {APART: "1"}) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:  # the child has it too, but a kernel does not look
            try:
                code = child.wait(CTRL_C_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                code = 130
        except SystemExit:  # SIGTERM came to process 1 only
            child.kill()
            raise
    if code < 0:
        name = signal.Signals(-code).name
        file = one_line(file)
        where = f"{program()} try {shlex.quote(file)}"
        notice(f"{program()}: error: {file} crashed ({name}); {where} says where")
        code = 1
    sys.exit(code)


def fail(message: str) -> None:
    """Print one line on stderr and exit with 2."""
    notice(f"{program()}: error: {one_line(message)}")
    sys.exit(2)


def show_warning(message: Warning | str, *_) -> None:
    """Print a warning in one line. Python's own format takes two and shows a line of this code."""
    notice(f"{program()}: warning: {one_line(str(message))}")
