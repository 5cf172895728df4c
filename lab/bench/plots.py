"""gpt.py bench --plot: a run as pictures, SVG and PNG.

Contenders differ by marker and line as well as by colour (Okabe & Ito's palette, for colour-blind readers),
so that a picture is legible in black and white.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shakespeare.lab.bench import report
from shakespeare.lab.bench.contenders import CUDA_CONTENDERS, contenders
from shakespeare.lab.bench.gpu_bench import sequential_text
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.formats import counted, size_text

try:
    import matplotlib
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
except ImportError:
    raise ValueError("--plot needs Matplotlib: pip install -c constraints.txt -e '.[lab]'") from None

# A contender takes them by its number; of different lengths, so that no look soon comes again.
COLOURS = ("#000000", "#D55E00", "#E69F00", "#009E73", "#0072B2", "#CC79A7")
MARKERS = ("s", "v", "^", "D", "o", "X", "P")
LINES = ("-", "--", "-.", ":")
SETTINGS = {
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "axes.axisbelow": True,
    "font.size": 11,
    "svg.hashsalt": "shakespeare",
    "legend.frameon": False,
}


def look(contender: str) -> dict[str, Any]:
    """A contender's colour, marker and line, as arguments of Axes.plot()."""
    names = list(contenders())
    number = names.index(contender) if contender in names else zlib.crc32(contender.encode())
    chosen = (looks[number % len(looks)] for looks in (COLOURS, MARKERS, LINES))
    return dict(zip(("color", "marker", "linestyle"), chosen))


def draw(run: Run, directory: Path) -> list[Path]:
    """Draw every picture that the run has figures for; return the written files."""
    written = []
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        for picture in PICTURES:
            figure = picture(run)
            if figure is None:
                continue
            where = (run.machine.get("gpu") or {}).get("name", run.machine["cpu"])
            figure.supxlabel(where, x=0.99, ha="right", fontsize=7, color="#666666")
            for form in ("svg", "png"):
                file = directory / f"{picture.__name__}.{form}"
                figure.savefig(file, dpi=160, metadata={"Date": None} if form == "svg" else None)
                written.append(file)
    return written


def time(run: Run) -> Figure | None:
    """Time of a call against N, log-log; a panel for each head width and number of threads."""
    timed = [r for r in run.results if r.seconds]
    title = "Time of attention by length, with the best tile"
    return _by_length(timed, title, "ms a call", lambda r: 1e3 * (r.median or 0), min)


def rates(run: Run) -> Figure | None:
    """Operations per second of a call on a GPU against N; a panel as of time()."""
    timed = [r for r in run.results if r.median and r.cell.device == "cuda"]
    title = "Speed of attention by length"
    figure = _by_length(timed, title, "TFLOP/s", lambda r: 1e-12 * r.cell.flops / (r.median or 1), max)
    for axes in figure.axes if figure else ():
        axes.set_yscale("linear")
    return figure


def memory(run: Run) -> Figure | None:
    """Scratch against N, log-log."""
    sized = [r for r in run.results if r.scratch]
    title = "Memory beyond the output by length, with the largest tile"
    figure = _by_length(sized, title, "scratch", lambda r: r.scratch or 0, max)
    for axes in figure.axes if figure else ():
        axes.yaxis.set_major_locator(LogLocator(base=16))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda size, _: size_text(size))
    return figure


def _by_length(
    results: list[Result], title: str, label: str, y: Callable[[Result], float], choose: Callable
) -> Figure | None:
    """A line for each contender over N; `choose` selects among several tiles or SIMD helpers."""

    def panel(axes: Axes, results: list[Result]) -> None:
        lines: dict[str, dict[int, float]] = {}
        for r in results:
            points = lines.setdefault(r.cell.contender, {})
            points[r.cell.N] = choose(points.get(r.cell.N, y(r)), y(r))
        for name, points in lines.items():
            xs = sorted(points)
            axes.plot(xs, [points[x] for x in xs], label=contenders()[name].title, **look(name))
        _log_log(axes, "N, keys and queries", label)

    return _panels(results, title, panel) if len({r.cell.N for r in results}) > 1 else None


def tiles(run: Run) -> Figure | None:
    """Speed by tile, as a share of the best tile's, of the first tiled part at the longest N."""
    timed = [r for r in run.results if r.cell.br and r.seconds]
    timed = _longest([r for r in timed if r.cell.contender == timed[0].cell.contender])
    rows, columns = (sorted({getattr(r.cell, side) for r in timed}) for side in ("br", "bc"))
    if len(rows) * len(columns) < 2:
        return None

    def panel(axes: Axes, results: list[Result]) -> None:
        share = np.full((len(rows), len(columns)), np.nan)
        best = min(r.median or 0 for r in results)
        for r in results:  # the fastest of several SIMD helpers counts
            at = rows.index(r.cell.br), columns.index(r.cell.bc)
            share[at] = np.fmax(share[at], 100 * best / (r.median or 1))
        axes.grid(False)
        axes.imshow(share, cmap="cividis", vmin=50, vmax=100, origin="lower", aspect="auto")
        for (i, j), value in np.ndenumerate(share):
            if not np.isnan(value):
                colour = "black" if value > 75 else "white"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel="Bc, keys", ylabel="Br, queries")

    cell = timed[0].cell
    return _panels(timed, f"Speed of {cell.contender} by tile, N = {cell.N}, in % of the best", panel)


def roofline(run: Run) -> Figure | None:
    """Each part's speed over its arithmetic intensity, at the longest N, under this machine's limits.

    Williams, Waterman & Patterson 2009 (doi:10.1145/1498765.1498785). Bytes are the part's own count of
    transfers into the last of a core's own caches.
    """
    counts = _longest([r for r in run.results if r.seconds and r.traffic and r.cell.device == "cpu"])
    if not counts:
        return None
    small: dict = {"textcoords": "offset points", "fontsize": 9}

    def panel(axes: Axes, results: list[Result]) -> None:
        threads = results[0].cell.threads
        peak = run.peaks[threads] / 1e9
        bandwidth = run.bandwidths[threads] / 1e9
        ridge = peak / bandwidth
        results = sorted(results, key=lambda r: -(r.median or 0))  # the fastest of several tiles counts
        points = {
            r.cell.contender: (r.cell.flops / (r.traffic or 1), r.cell.flops / (r.median or 1) / 1e9)
            for r in results
        }
        for i, (name, point) in enumerate(sorted(points.items(), key=lambda named: named[1])):
            axes.plot(*point, **look(name) | {"linestyle": "", "markersize": 9})
            side = ("right", (-8, -4)) if i < len(points) // 2 else ("left", (8, -4))  # clear of neighbours
            axes.annotate(name, point, side[1], ha=side[0], **small)
        intensities = [ridge, *(x for x, _ in points.values())]
        left = min(intensities) / 2
        right = max(intensities) * 2
        axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="#666666", linewidth=1.5)
        axes.annotate(f"FMA peak, {peak:.0f} GFLOP/s", (right, peak), (-4, 4), ha="right", **small)
        axes.annotate(f"{bandwidth:.0f} GB/s", (left, left * bandwidth), (14, 2), **small)
        _log_log(axes, f"FLOP per byte from beyond {size_text(run.cache)} of cache", "GFLOP/s", base=10)
        axes.margins(y=0.12)

    return _panels(counts, f"Roofline, N = {counts[0].cell.N}", panel)


def ladder(run: Run) -> Figure | None:
    """The speed-up of each CUDA kernel over C++, in the first case with kernels and the first state of L2."""
    kernels = [r for r in run.results if r.cell.contender in CUDA_CONTENDERS and r.median]
    rows = [report.row(run, r) for r in kernels if r.cell.group == kernels[0].cell.group]
    if len(rows) < 2 or not rows[0]["over_sequential"]:
        return None
    figure = Figure(figsize=(10, 1.6 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    table = [CUDA_CONTENDERS[row["contender"]] for row in reversed(rows)]
    values = [row["over_sequential"] for row in reversed(rows)]
    hatches = ["//" if "-" in kernel.name else "" for kernel in table]  # variants, such as 3-spilled
    names = [f"{kernel.name}: {kernel.summary}" for kernel in table]
    bars = axes.barh(names, values, color=COLOURS[4], edgecolor="white", hatch=hatches, log=True)
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=9, padding=2)
    axes.grid(False, axis="y")
    axes.margins(x=0.1)
    axes.tick_params(axis="y", labelsize=9)
    axes.set_xlabel("times as fast as sequential C++")
    cell = kernels[0].cell
    shape = f"({cell.batch}, {cell.heads}, {cell.N}, {cell.d})"
    title = [f"CUDA kernels at {shape}, {cell.dtype}{', causal' if cell.causal else ''}"]
    figure.suptitle("\n".join(title + [sequential_text(result) for result in run.sequential]), fontsize=9)
    return figure


def _longest(results: list[Result]) -> list[Result]:
    """The results at the longest N among them."""
    return [r for r in results if r.cell.N == max(other.cell.N for other in results)]


def _panels(results: list[Result], title: str, panel: Callable[[Axes, list[Result]], None]) -> Figure:
    """A figure with a panel for each mask, head width and number of threads, and a legend of all lines."""
    groups: dict[tuple, list[Result]] = {}
    for r in results:
        groups.setdefault((r.cell.causal, r.cell.d, r.cell.threads), []).append(r)
    across = min(3, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(5.2 * across + 1.6, 3.9 * down + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    handles: dict[str, Any] = {}
    panels = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for axes, (causal, d, threads) in zip(panels, sorted(groups)):
        words = f"d = {d}" + (", causal" if causal else "")
        words += f", {counted(threads, 'thread')}" if results[0].cell.device == "cpu" else ""
        axes.set_title(words, fontsize=11)
        panel(axes, groups[causal, d, threads])
        artists, labels = axes.get_legend_handles_labels()
        handles.update(zip(labels, artists))
    for axes in panels[len(groups) :]:
        axes.remove()
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside right center")
    return figure


def _log_log(axes: Axes, x: str, y: str, base: int = 2) -> None:
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, _: f"{number:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set(xlabel=x, ylabel=y)


PICTURES: tuple[Callable[[Run], Figure | None], ...] = (time, rates, tiles, roofline, memory, ladder)
