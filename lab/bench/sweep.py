"""gpt.py bench in the terminal: the plan, the progress bar, and the output of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attention_ext import processor, tiles
from lab import saved
from lab.bench import compare, report, tune
from lab.bench.cases import Cell, check_memory
from lab.bench.cuda import GpuBench
from lab.bench.measure import Bench
from lab.bench.results import Run

Echo = Callable[..., None]  # click.echo's signature
REFRESH_SECONDS = 0.2  # least time between two pictures of the progress bar
# Operations per second, to weight the cells of the progress bar.
ASSUMED_FLOPS = {"cpu": 5e10, "cuda": 2e13}


def plan_text(cells: Sequence[Cell], rounds: int) -> str:
    """The plan of a sweep, one line for each cell."""
    lines = [f"{len(cells)} cells, {rounds} rounds each"]
    for cell in cells:
        lines.append(f"{compare.case(cell)}; {cell.flops / 1e9:.3g} GFLOP")
    return "\n".join(lines)


def measure(
    cells: Sequence[Cell], rounds: int, min_time: float, against_cpu: bool = False
) -> tuple[Run, bool]:
    """Measure a sweep, with a progress bar on a terminal; return the run and whether Ctrl-C stopped it.

    against_cpu: with cells on a GPU, also time sequential C++.
    """
    bench: Bench | GpuBench
    if cells[0].device == "cuda":
        bench = GpuBench(cells, rounds, min_time, against_cpu=against_cpu)
    else:
        bench = Bench(cells, rounds, min_time)
    # A cell's time is unknown; its operations and the requested least time are known.
    weight = {
        cell: max(min_time, rounds * cell.flops / ASSUMED_FLOPS[cell.device]) / rounds for cell in cells
    }
    steps = 1 + rounds  # verified, timed
    try:
        with progress(sum(weight.values()) * steps, "measuring") as advance:
            with contextlib.closing(bench.run()) as measured:
                for cell, _ in measured:
                    advance(0 if bench.again else weight[cell], cell.contender + " again" * bench.again)
    except KeyboardInterrupt:
        return bench.done, True
    return bench.done, False


def find_tiles(
    cells: Sequence[Cell], budget: float, br: Sequence[int], bc: Sequence[int], echo: Echo
) -> None:
    """Tune the tile for each cell, within `budget` seconds in all, and keep the results.

    br, bc: sides to try; empty for all.
    """
    check_memory(cells)
    found = []
    try:
        with progress(budget, "tuning") as advance:
            for cell in cells:
                best, start = None, time.perf_counter()
                for best in tune.tune(cell, budget / len(cells), tune.candidates(cell.N, br, bc)):
                    advance(time.perf_counter() - start, f"N={cell.N}, d={cell.d}: {best.br} x {best.bc}")
                    start = time.perf_counter()
                if best:
                    found.append(best)
    finally:  # Ctrl-C keeps the finished cells
        if found:
            echo(tune.text(found))
            tiles.write(found)
            echo(f"\nKept in {tiles.path()} for part4's auto tiles on this processor.")


def tuned_text() -> str:
    """The kept tiles of this processor."""
    found = tiles.read()
    if not found:
        return f"Nothing is kept for this processor in {tiles.path()}."
    return f"{tune.text(found)}\n\nFrom {tiles.path()}, for {processor.name()}."


@contextlib.contextmanager
def progress(total: float, doing: str) -> Iterator[Callable[[float, str], None]]:
    """A bar with the time left, on stderr if that is a terminal; gives the function that advances it.

    The bar is drawn between measurements, not by another thread.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as bar:
        task, drawn = bar.add_task(doing, total=total), 0.0

        def advance(amount: float, what: str) -> None:
            nonlocal drawn
            bar.update(task, advance=amount, description=f"{doing} {what}")
            if time.monotonic() - drawn > REFRESH_SECONDS:
                bar.refresh()
                drawn = time.monotonic()

        yield advance


@dataclass
class Output:
    """The output of a run.

    cells, rounds: those of the run. form: one of report.FORMATS. save: a file to keep the run in. old: the
    file of a run to compare with, by `threshold`, a share of the time. plot: a directory for pictures.
    Raises ValueError and OSError for wrong arguments before anything is measured.
    """

    cells: Sequence[Cell]
    rounds: int
    form: str = "md"
    save: str | None = None
    old: str | None = None
    threshold: float = compare.THRESHOLD
    plot: str | None = None

    def __post_init__(self) -> None:
        if self.save:
            saved.check_file(self.save)
        self.before = report.load(Path(self.old)) if self.old else None
        if self.before:
            compare.check(self.before, list(self.cells), self.rounds)
        if self.plot:
            from lab.bench import plots  # noqa: F401  raises ValueError without Matplotlib

            Path(self.plot).mkdir(parents=True, exist_ok=True)

    def show(self, run: Run, echo: Echo, notice: Echo) -> bool:
        """Save, print, compare and draw a run; return whether anything is slower than before, or wrong.

        A run that was stopped before anything was timed is not saved: the file may hold another one.
        """
        if self.save and any(result.seconds for result in run.results):
            report.save(run, Path(self.save))
        echo(report.text(run, self.form))
        worse = False
        if self.before:
            compared = compare.compare(self.before, run, self.threshold)
            echo("\n" + compare.text(compared, self.before, run, self.threshold))
            worse = compared.worse
        if run.busy:
            notice(run.busy)
        if infirm := report.infirm(run):
            notice(infirm)
        if self.plot:
            from lab.bench import plots

            for file in plots.draw(run, Path(self.plot)):
                notice(f"wrote {file}")
        return worse
