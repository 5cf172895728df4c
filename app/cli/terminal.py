"""What commands say: the program's name, and lines for the person at the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click


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


def one_line(text: str) -> str:
    """The text in one line, with control characters escaped: file names and contents may hold any."""
    text = text.replace("\n\t", " ").rstrip()  # click lists a missing argument's choices over several lines
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
