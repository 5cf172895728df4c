"""What the benchmarks share: texts, contenders that take turns, their spread, and tables in Markdown."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from generation.engine import Engine
from generation.writer import Request, Writer

if TYPE_CHECKING:
    from lab.timing import Samples

Name = TypeVar("Name")


def powers(most: int) -> str:
    """1,2,4 ... and `most`."""
    return ",".join(map(str, sorted({most, *(2**i for i in range(most.bit_length()))})))


def write(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of texts that are written together."""
    writer = Writer(engine, len(requests))
    texts = {writer.join(request): list[int]() for request in requests}
    while written := writer.step():
        for text, tokens in written:
            texts[text] += tokens.tolist()
    return list(texts.values())


QUIET = "quiet | all samples' time"  # the titles of quiet()


def quiet(samples: "Samples") -> str:
    """How many samples were quiet, and the median of all as a multiple of the quiet ones'."""
    return f"{samples.quiet} | {samples.disturbance:.2f}"


def take_turns(contenders: Mapping[Name, Callable[[], float]], rounds: int) -> "dict[Name, Samples]":
    """The seconds that each contender returns in each round; the contenders take turns."""
    from lab import timing  # it imports torch, and benchmarks.start measures memory without it

    return dict(zip(contenders, timing.take_turns([*contenders.values()], rounds)))


def spread(seconds: Sequence[float]) -> float:
    """The interquartile range of at least two numbers, as a share of the median."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return (high - low) / median


def percent(share: float) -> str:
    """0.5 as '50 %'."""
    return f"{100 * share:.0f} %"


def show_table(titles: str, rows: Iterable[str]) -> None:
    """Print a table in Markdown, each row as soon as it is there. A line's cells have ' | ' between them."""
    click.echo(f"| {titles} |")
    click.echo("|---" * (titles.count("|") + 1) + "|")
    for row in rows:
        click.echo(f"| {row} |")
