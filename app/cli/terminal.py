"""What commands say: the program's name, and lines for the person at the terminal."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

REFRESH_SECONDS = 0.2  # least time between two pictures of a progress bar


def program() -> str:
    """The name that messages begin with: 'shakespeare', the installed command, or 'gpt.py'."""
    return "shakespeare" if Path(sys.argv[0]).stem == "shakespeare" else "gpt.py"


def to_type() -> str:
    """The first words of a command that the user can copy."""
    return program() if program() == "shakespeare" else f"python {program()}"


def notice(sentence: str, nl: bool = True) -> None:
    """Print a line on stderr, for the person at the terminal; nothing ends because stderr was closed."""
    try:
        click.echo(sentence, nl=nl, err=True)
    except OSError:  # Python would try to write the rest at its end, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Notices(logging.Handler):
    """Shows what the library logs on stderr; an error as the command's own."""

    def emit(self, record: logging.LogRecord) -> None:
        sentence = one_line(record.getMessage())
        error = record.levelno >= logging.ERROR
        notice(f"{program()}: error: {sentence}" if error else sentence)


NOTICES = Notices()


def one_line(text: str) -> str:
    """The text in one line, with control characters escaped: file names and contents may hold any."""
    text = text.replace("\n\t", " ").rstrip()  # click lists a missing argument's choices over several lines
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def progress(times: bool = False) -> Iterator[tuple[Callable[..., None], Callable[[str], None]]]:
    """(update, print_line) of a progress bar on stderr, if that is a terminal and rich is installed.

    update: takes the arguments of rich's Progress.update(), and draws at once: a thread would disturb what is
    measured. print_line: prints a line above the bar. times: show the time spent and left.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield (lambda **state: None), lambda line: notice(f"{program()}: {one_line(line)}")
        return
    timed = "{task.description}", BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    columns = timed if times else (BarColumn(), "{task.description}")
    console = Console(stderr=True)
    drawn = 0.0
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as bar:
        task = bar.add_task("starting")

        def update(**state) -> None:
            nonlocal drawn
            bar.update(task, **state)
            if time.monotonic() - drawn > REFRESH_SECONDS:
                bar.refresh()
                drawn = time.monotonic()

        def print_line(line: str) -> None:
            text = f"{program()}: {one_line(line)}"
            notice(text) if hidden else console.print(text, markup=False)

        yield update, print_line
