"""What train shows while it runs: a live picture on a terminal, else a line for each evaluation."""

import contextlib
import copy
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shakespeare import generate
from shakespeare.app.cli.terminal import notice
from shakespeare.attention_ext import BuildError
from shakespeare.lab.race import harmless
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.gpt import GPT
from shakespeare.model.tokenizer import CharTokenizer
from shakespeare.training.schedule import Schedule, Watcher

SAMPLE_SHARE = 0.015  # share of the time that samples may take
SAMPLE_SECONDS = 3.0  # least time between two samples
REDRAW_SECONDS = 0.5
PLOT_ROWS, PLOT_COLUMNS, SAMPLE_ROWS = 10, 60, 8  # the most of each
VALIDATION, TRAINING = "cyan", "yellow"  # colors of the curves


@contextlib.contextmanager
def watch(name: str, quiet: bool) -> Iterator[Watcher]:
    """A picture on a terminal, else lines."""
    seen = all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
    console = Console(stderr=True)
    # Without colors the curves could not be told apart, and half blocks are in Unicode only.
    drawn = console.encoding.startswith("utf") and not (console.is_dumb_terminal or console.no_color)
    if not seen or quiet or not drawn:
        yield Lines(quiet)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield Picture(name, live)


class Lines(Watcher):
    """Writes a line on standard error for each evaluation; if quiet, only warnings."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def note(self, sentence: str) -> None:
        notice(sentence)

    def evaluated(self, run: Schedule) -> None:
        if self.quiet:
            return
        done, train, validation = run.curve[-1]
        if train is None:
            notice(f"before the first step: val {validation:.4f}")
            return
        notice(
            f"step {done}/{run.steps()}  train {train:.4f}  val {validation:.4f}  "
            f"{run.speed():,.0f} characters/s  {run.seconds:.0f} s, {run.left():.0f} s left"
        )


class Picture(Watcher):
    """Draws the curves, the speed and a sample of the averaged weights in place, on a terminal."""

    _sampler: "Sampler | None" = None

    def __init__(self, name: str, live: Live) -> None:
        self.name, self.live, self.sample, self._drawn = name, live, "", 0.0

    def begin(self, averaged: GPT, tokenizer: CharTokenizer) -> None:
        self._sampler = Sampler(averaged, tokenizer)

    def note(self, sentence: str) -> None:
        self.live.console.print(Text(sentence))

    def stepped(self, run: Schedule) -> None:
        if self._sampler is not None and self._sampler.due():
            self.sample = self._sampler.write()
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self.evaluated(run)

    def evaluated(self, run: Schedule) -> None:
        self.live.update(picture(self.name, run, self.sample, self.live.console), refresh=True)
        self._drawn = time.monotonic()


class Sampler:
    """Writes samples with the current model, so rarely that they take a small share of the time."""

    def __init__(self, averaged: GPT, tokenizer: CharTokenizer) -> None:
        self.averaged, self.tokenizer = averaged, tokenizer
        self.prompt = "\n" if "\n" in tokenizer.characters else tokenizer.characters[0]
        self.part, self.tokens = "part4", 300
        self._wait(0.05)  # an estimate for the first sample

    def _wait(self, seconds: float) -> None:
        """Set the time of the next sample, which probably takes these seconds."""
        self._next = time.monotonic() + max(SAMPLE_SECONDS, seconds / SAMPLE_SHARE)

    def due(self) -> bool:
        """Whether it is time for the next sample."""
        return time.monotonic() >= self._next

    def write(self) -> str:
        """A sample. If the kernels cannot be compiled, PyTorch's attention is used from now on."""
        start = time.monotonic()
        model = self.averaged
        if next(model.parameters()).is_cuda:
            model = copy.deepcopy(model).cpu()
        checkpoint = Checkpoint(model.config, model.weights, self.tokenizer)
        try:
            text = generate(checkpoint, self.prompt, self.tokens, part=self.part, seed=1, context="reset")
        except BuildError:
            self.part, self.tokens, text = "part0", 100, ""
        self._wait(time.monotonic() - start)
        return str(text)


def picture(name: str, run: Schedule, sample: str, console: Console) -> Group:
    """The whole picture, fitted to the console."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(name, style="bold"),
        f"step {run.done:,} of {run.steps():,}",
        f"{run.speed():,.0f} characters/s",
        f"learning rate {run.rate():.0%}",
        f"{timedelta(seconds=round(run.left()))} left",
    )
    width = min(PLOT_COLUMNS + 8, console.width)
    full = round(width * run.progress())
    parts: list = [head, Text("━" * full, VALIDATION) + Text("─" * (width - full), "dim")]
    if run.curve:
        parts += curves(run.curve, max(1, width - 8), run.progress())
    if sample:
        rows = max(1, min(SAMPLE_ROWS, console.height - PLOT_ROWS - 8))
        lines = Text(harmless(sample)).wrap(console, width - 4, overflow="fold")
        parts.append(Panel(Text("\n").join(lines[:rows]), width=width, title="a sample"))
    return Group(*parts, "")  # the cursor's line stays empty: a terminal echoes ^C there


def curves(curve: Sequence[Sequence[float | None]], width: int, progress: float) -> list[Text]:
    """A plot of both losses over the steps, and its legend. A row of characters shows two of the plot.

    curve: rows [step, training loss or None, validation loss]. progress: the share of the run that is done,
    in [0, 1]; the curve ends at this share of the width.
    """
    rows, height = np.array(curve, dtype=float), 2 * PLOT_ROWS  # NaN for None
    low = np.nanmin(rows[:, 1:])
    # The first losses are cut off: beside them the others would be a flat line.
    high = np.nanmax(rows[len(rows) // 8 :, 1:])
    ends = (rows[:, 0] / max(1, rows[-1, 0]) * progress * (width - 1)).astype(int)
    grid = np.full((height, width), "", dtype=object)  # colors
    for which, color in ((1, TRAINING), (2, VALIDATION)):
        known = ~np.isnan(rows[:, which])
        if not known.any():
            continue
        columns = np.arange(ends[known][0], ends[known][-1] + 1)
        losses = np.interp(columns, ends[known], rows[known, which])
        at = np.clip(((high - losses) / max(high - low, 1e-9) * (height - 1)).round(), 0, None).astype(int)
        for column, above, row in zip(columns, [at[0], *at], at):
            grid[min(above, row) : max(above, row) + 1, column] = color
    lines = [
        Text.assemble(f"{loss:7.3f} ", *map(cell, tops, bottoms))
        for loss, tops, bottoms in zip(np.linspace(high, low, PLOT_ROWS), grid[::2], grid[1::2])
    ]
    _, train, validation = curve[-1]
    known = f"{validation:.4f}   ", ("training ", TRAINING), "-" if train is None else f"{train:.4f}"
    return [*lines, Text.assemble(" " * 8, ("validation ", VALIDATION), *known)]


def cell(top: str, bottom: str) -> tuple[str, str]:
    """A character whose halves have these colors ('' is no color), and its style."""
    if top:
        return "▀", f"{top} on {bottom}" if bottom else top
    return ("▄", bottom) if bottom else (" ", "")
