"""What train shows while it runs: a live picture on a terminal, else a line for each evaluation."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.align import Align
from rich.bar import Bar
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shakespeare import generate
from shakespeare.app.cli.terminal import notice
from shakespeare.attention_ext import BuildError
from shakespeare.lab.race import harmless, on_terminal
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.tokenizer import CharTokenizer
from shakespeare.training.schedule import Schedule, Watcher

if TYPE_CHECKING:
    from shakespeare.training.cuda.trainer import CudaTrainer
    from shakespeare.training.trainer import Trainer

SAMPLE_SHARE = 0.015  # share of the time that samples may take
SAMPLE_SECONDS = 3.0  # least time between two samples
REDRAW_SECONDS = 0.5
WIDTH = 68  # at most
LOSS_ROWS = 10
SAMPLE_ROWS = 8


@contextlib.contextmanager
def watch(name: str, quiet: bool, stops: Callable[[], bool]) -> Iterator[Watcher]:
    """A picture on a terminal, else lines. stops: tells whether the run is to stop."""
    console = Console(stderr=True)
    drawn = console.encoding.startswith("utf") and not console.is_dumb_terminal  # bars are in Unicode only
    if not on_terminal() or quiet or not drawn:
        yield Lines(quiet, stops)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield Picture(name, live, stops)


class Lines(Watcher):
    """Writes a line on standard error for each evaluation; if quiet, only warnings."""

    def __init__(self, quiet: bool, stops: Callable[[], bool]) -> None:
        super().__init__(stops)
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
        held_out = "" if validation is None else f"val {validation:.4f}  "
        speed = f"{run.speed():,.0f} characters/s  {run.seconds:.0f} s, {run.left():.0f} s left"
        notice(f"step {done}/{run.steps()}  train {train:.4f}  {held_out}{speed}")


class Picture(Watcher):
    """Draws losses, speed and a sample of the averaged weights, of `tokens` by `part`, on a terminal."""

    part = "part4"
    tokens = 300

    def __init__(self, name: str, live: Live, stops: Callable[[], bool] = lambda: False) -> None:
        super().__init__(stops)
        self.name = name
        self.live = live
        self.sample = ""
        self._drawn = 0.0

    def begin(self, trainer: "Trainer | CudaTrainer", tokenizer: CharTokenizer) -> None:
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._prompt = "\n" if "\n" in tokenizer.characters else tokenizer.characters[0]
        self._next_sample = time.monotonic() + SAMPLE_SECONDS

    def note(self, sentence: str) -> None:
        self.live.console.print(Text(sentence))

    def stepped(self, run: Schedule) -> None:
        start = time.monotonic()
        if start >= self._next_sample:
            self.sample = self.write()
            now = time.monotonic()
            self._next_sample = now + max(SAMPLE_SECONDS, (now - start) / SAMPLE_SHARE)
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self.evaluated(run)

    def evaluated(self, run: Schedule) -> None:
        self.live.update(picture(self.name, run, self.sample, self.live.console), refresh=True)
        self._drawn = time.monotonic()

    def write(self) -> str:
        """A sample. If the kernels cannot be compiled, PyTorch's attention is used from now on."""
        checkpoint = Checkpoint(self._trainer.config, self._trainer.averages(), self._tokenizer)
        try:
            text = generate(checkpoint, self._prompt, self.tokens, part=self.part, seed=1, context="reset")
            return str(text)
        except BuildError:
            self.part = "part0"
            self.tokens = 100
            return ""


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
    width = min(WIDTH, console.width)
    parts: list = [head, Align.left(ProgressBar(1.0, run.progress(), width))]
    if run.curve:
        parts.append(losses(run.curve, width))
    if sample:
        rows = max(1, min(SAMPLE_ROWS, console.height - LOSS_ROWS - 8))
        lines = Text(harmless(sample)).wrap(console, width - 4, overflow="fold")
        parts.append(Panel(Text("\n").join(lines[:rows]), width=width, title="a sample"))
    return Group(*parts, "")  # the cursor's line stays empty: a terminal echoes ^C there


def losses(curve: Sequence[Sequence[float | None]], width: int) -> Table:
    """A table of evenly spaced rows [step, training loss or None, validation loss], with a bar for each."""
    last = len(curve) - 1
    count = min(len(curve), LOSS_ROWS)
    shown = [curve[last * i // max(1, count - 1)] for i in range(count)]
    largest = max(validation or 0.0 for _, _, validation in shown)
    table = Table("step", "training", "validation", "", box=None, pad_edge=False, width=width)
    for step, training, validation in shown:
        numbers = ("-" if loss is None else f"{loss:.4f}" for loss in (training, validation))
        table.add_row(f"{step:,}", *numbers, Bar(largest, 0, validation or 0.0, color="cyan"))
    return table
