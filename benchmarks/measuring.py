"""What the benchmarks share: contenders that take turns or fail, Markdown tables."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import click

from shakespeare.lab import timing
from shakespeare.lab.machine import Load
from shakespeare.lab.timing import Samples

MOST_REASON = 200  # characters of why a contender failed
QUIET = "quiet | all samples' time"  # titles: how many samples were quiet; all samples' median over theirs


def attempt(failed: dict[str, str], name: str, call: Callable[..., Any], *given: Any) -> Any:
    """A contender's result, or None after an error: `failed` then has the reason."""
    try:
        return call(*given)
    except Exception as error:  # packages raise types of their own
        missing = isinstance(error, ModuleNotFoundError) and error.name
        reason = " ".join(str(error).split("\n\n")[0].replace("|", "/").split()) or type(error).__name__
        failed[name] = f"{missing} is not installed" if missing else f"failed: {reason[:MOST_REASON]}"
        return None


def take_turns(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    failed: dict[str, str],
    load: Load | None,
    size: int,
) -> dict[str, Samples]:
    """The seconds that each contender returns in each round; the contenders take turns.

    failed: gets those that raise an error, which the result lacks. load, size: as in lab.timing.take_turns().
    """

    def turn(name: str) -> float:
        seconds = None if name in failed else attempt(failed, name, contenders[name])
        return math.nan if seconds is None else seconds

    samples = timing.take_turns([partial(turn, name) for name in contenders], rounds, load, size)
    return {name: of for name, of in zip(contenders, samples) if name not in failed}


def percent(share: float) -> str:
    """0.5 as '50 %'."""
    return f"{100 * share:.0f} %"


def show_table(titles: str, rows: Iterable[str]) -> None:
    """Print a Markdown table row by row; ' | ' separates cells."""
    click.echo(f"| {titles} |")
    click.echo("|---" * (titles.count("|") + 1) + "|")
    for row in rows:
        click.echo(f"| {row} |")
