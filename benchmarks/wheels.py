"""The kernels of a wheel against those compiled for this very processor: tokens per second of one thread.

    python -m benchmarks.wheels [--weights bf16] [--rounds 9]

The decoder is compiled for each kind of processor that a wheel has and this one is. All take turns, after
their texts have been compared: they must be the same. A figure is the median of the rounds.
"""

import platform
import runpy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click

from app.cli import options
from attention_ext import processor
from attention_ext.build import prebuilt
from benchmarks.measuring import QUIET, attempt, percent, quiet, show_table, spread, take_turns, write
from generation import native
from generation.engine import Engine, open_engine
from generation.writer import Request
from lab.timing import seconds_of
from model import load

ROOT = Path(__file__).resolve().parent.parent
HERE = "this processor"
PLATFORM = f"manylinux_2_17_{platform.machine()}"
TEXTS = {"one text": 1, "32 texts": 32}


def engines(weights: str, failed: dict[str, str]) -> dict[str, Engine]:
    """An engine over each library, by the kind of processor it is compiled for. failed: see attempt()."""
    make = runpy.run_path(str(ROOT / "scripts" / "make-wheels.py"))
    target, machine = make["PLATFORMS"][PLATFORM]
    opened, checkpoint = {}, load("shakes256")
    levels = prebuilt.LEVELS[machine]
    with tempfile.TemporaryDirectory() as folder:
        for level in (HERE, *levels):
            if level != HERE:
                if not levels[level] <= processor.features():
                    continue
                prebuilt.FOLDER, prebuilt.LEVELS[machine] = Path(folder), {level: set()}
                Path(folder, prebuilt.SUMS).unlink(missing_ok=True)
                library = Path(folder, f"decoder-{level}.so")
                attempt(failed, level, make["compile_for"], target, level, library)
                if level in failed:
                    continue
                make["write_sums"](Path(folder))
            native.library.cache_clear()
            asked: dict[str, Any] = {"slots": max(TEXTS.values()), "threads": 1, "draft": "off"}
            if engine := attempt(failed, level, partial(open_engine, checkpoint, weights=weights, **asked)):
                opened[level] = engine
    return opened


def texts_of(engine: Engine, count: int) -> list[list[int]]:
    """The tokens of texts of a whole block."""
    length = engine.config.block_size - 1
    return write(engine, [Request([0], seed, max_new_tokens=length) for seed in range(count)])


@click.command(context_settings={"show_default": True})
@options.weights
@options.whole("--rounds", "Rounds of each.", least=2, default=9)
def main(weights: str, rounds: int) -> None:
    """Print tokens per second by the kind of processor."""
    failed: dict[str, str] = {}
    opened = engines(weights, failed)
    if HERE in failed:
        raise click.ClickException(f"{HERE}: {failed[HERE]}")
    for name, engine in opened.items():
        if texts_of(engine, 2) != texts_of(opened[HERE], 2):
            raise click.ClickException(f"{name} writes another text, so nothing is timed")
    click.echo(f"{processor.name()}; shakes256, weights in {weights}, one thread\n")

    def rows():
        for title, count in TEXTS.items():
            calls = {name: partial(seconds_of, partial(texts_of, e, count)) for name, e in opened.items()}
            seconds = take_turns(calls, rounds, failed)
            tokens, own = count * (opened[HERE].config.block_size - 1), seconds[HERE].median
            for name, times in seconds.items():
                median = times.median
                cells = f"{tokens / median:,.0f} | {percent(spread(times.counted))} | {own / median:.2f}"
                yield f"{title} | {name} | {cells} | {quiet(times)}"

    show_table(f"texts | compiled for | tokens/s | spread | of this processor's | {QUIET}", rows(), failed)


if __name__ == "__main__":
    main()
