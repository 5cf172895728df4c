"""What the benchmarks share: contenders that fail, Markdown tables."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from shakespeare.lab.formats import markdown_lines

MOST_REASON = 200  # characters of why a contender failed
QUIET = "quiet | all samples' time"  # titles: how many samples were quiet; all samples' median over theirs


@contextmanager
def attempt(failed: dict[str, str], name: str) -> Iterator[None]:
    """Catch a contender's error: `failed` then has the reason."""
    try:
        yield
    except Exception as error:  # packages raise types of their own
        missing = isinstance(error, ModuleNotFoundError) and error.name
        reason = " ".join(str(error).split("\n\n")[0].replace("|", "/").split()) or type(error).__name__
        failed[name] = f"{missing} is not installed" if missing else f"failed: {reason[:MOST_REASON]}"


def percent(share: float) -> str:
    """0.5 as '50 %'."""
    return f"{100 * share:.0f} %"


def show_table(titles: str, rows: Iterable[str]) -> None:
    """Print a Markdown table row by row; ' | ' separates cells."""
    for line in markdown_lines(titles.split(" | "), ([row] for row in rows)):
        click.echo(line)
