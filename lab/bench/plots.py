"""gpt.py bench --plot: a run as pictures, SVG and PNG.

Contenders differ by marker and line as well as by colour (Okabe & Ito's palette, for colour-blind readers),
so that a picture is legible in black and white.
"""

import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shakespeare.lab.bench import report
from shakespeare.lab.bench.contenders import OF_KERNEL, contenders
from shakespeare.lab.bench.cuda import sequential_seconds, sequential_text, smaller
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.text import counted, size_text

try:
    import matplotlib
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
except ImportError:
    raise ValueError("--plot needs Matplotlib: pip install -c constraints.txt -e '.[lab]'") from None

# Colour, marker and line of the contenders that are not parts.
OTHER_LOOKS = {"sdpa": ("#CC79A7", "X", "--"), "onnx": ("#56B4E9", "P", "-.")}
# The others take these in the order of contenders(), users' files by their names; of different lengths, so
# that no look soon comes again.
COLOURS = ("#000000", "#D55E00", "#E69F00", "#009E73", "#0072B2")
MARKERS = ("s", "v", "^", "D", "o", "<", ">")
LINES = ("-", "--", "-.", ":")
SETTINGS = {
    "font.size": 11,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "axes.axisbelow": True,
    "svg.hashsalt": "shakespeare",
    "legend.frameon": False,
}


def look(contender: str) -> dict[str, str]:
    """A contender's colour, marker and line, as arguments of Axes.plot()."""
    if contender in OTHER_LOOKS:
        chosen: tuple[str, ...] = OTHER_LOOKS[contender]
    else:
        names = [name for name in contenders() if name not in OTHER_LOOKS]
        number = names.index(contender) if contender in names else zlib.crc32(contender.encode())
        chosen = tuple(looks[number % len(looks)] for looks in (COLOURS, MARKERS, LINES))
    return dict(zip(("color", "marker", "linestyle"), chosen))


def draw(run: Run, directory: Path) -> list[Path]:
    """Draw every picture that the run has figures for; return the written files."""
    written = []
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        for name, picture in PICTURES.items():
            figure = picture(run)
            if figure is None:
                continue
            where = (run.machine.get("gpu") or {}).get("name", run.machine["cpu"])
            figure.supxlabel(where, x=0.99, ha="right", fontsize=7, color="#666666")
            for form in ("svg", "png"):
                file = directory / f"{name}.{form}"
                figure.savefig(file, dpi=160, metadata={"Date": None} if form == "svg" else None)
                written.append(file)
    return written


def time(run: Run) -> Figure | None:
    """Time of a call against N, log-log; a panel for each head width and number of threads."""

    def panel(axes: Axes, results: list[Result]) -> None:
        _lines(axes, _points(results, "N", lambda r: 1e3 * (r.median or 0), min))
        _log_log(axes, "N, keys and queries", "ms a call")

    return _panels([r for r in run.results if r.seconds], "Time of attention by length", panel, least=2)


def memory(run: Run) -> Figure | None:
    """Scratch against N, log-log."""

    def panel(axes: Axes, results: list[Result]) -> None:
        _lines(axes, _points(results, "N", lambda r: r.scratch or 0, max))
        _log_log(axes, "N, keys and queries", "scratch")
        axes.yaxis.set_major_locator(LogLocator(base=16))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda size, _: size_text(size))

    title, largest = "Memory beyond the output by length", "; with the largest tile"
    return _panels([r for r in run.results if r.scratch], title, panel, least=2, tiled=largest)


def scaling(run: Run) -> Figure | None:
    """Speed-up over the fewest threads, at the longest N; a panel for each head width."""
    timed = _longest([r for r in run.results if r.seconds])
    counts = sorted({r.cell.threads for r in timed})
    if len(counts) < 2:
        return None

    def panel(axes: Axes, results: list[Result]) -> None:
        fewest = counts[0]
        axes.plot(counts, [c / fewest for c in counts], color="#999999", linewidth=1, label="ideal")
        points = _points(results, "threads", lambda r: r.median or 0, min)
        speeds = {
            name: {count: times[fewest] / seconds for count, seconds in times.items()}
            for name, times in points.items()
            if fewest in times
        }
        _lines(axes, speeds)
        axes.set_xticks(counts)
        axes.set(xlabel="threads", ylabel=f"speed, {counted(fewest, 'thread')} = 1")

    return _panels(timed, f"Speed by threads, N = {timed[0].cell.N}", panel, by_threads=False)


def tiles(run: Run) -> Figure | None:
    """Speed by tile, as a share of the best tile's, of the first tiled part at the longest N."""
    timed = [r for r in run.results if r.cell.br and r.seconds]
    timed = _longest([r for r in timed if r.cell.contender == timed[0].cell.contender])
    rows, columns = (sorted({getattr(r.cell, side) for r in timed}) for side in ("br", "bc"))
    # The number of threads may decide the tile that is taken unless one is asked for.
    tried = {(r.cell.threads, r.cell.br, r.cell.bc) for r in timed}
    if not any(count > 1 for count in Counter(threads for threads, _, _ in tried).values()):
        return None

    def panel(axes: Axes, results: list[Result]) -> None:
        share = np.full((len(rows), len(columns)), np.nan)
        best = min(r.median or 0 for r in results)
        for r in results:  # of several SIMD helpers the fastest
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
    title = f"Speed of {cell.contender} by tile, N = {cell.N}, in % of the best"
    return _panels(timed, title, panel, legend=False, tiled="")


def roofline(run: Run) -> Figure | None:
    """Each part's speed over its arithmetic intensity, at the longest N, under this machine's limits.

    Williams, Waterman & Patterson 2009 (doi:10.1145/1498765.1498785). Bytes are the part's own count of
    transfers into the last of a core's own caches.
    """
    found = _longest([r for r in run.results if r.seconds and r.traffic and r.cell.device == "cpu"])
    if not found:
        return None

    def panel(axes: Axes, results: list[Result]) -> None:
        threads = results[0].cell.threads
        peak, bandwidth = run.peaks[threads] / 1e9, run.bandwidths[threads] / 1e9
        fastest = {r.cell.contender: r for r in sorted(results, key=lambda r: -(r.median or 0))}
        points = {
            name: {r.cell.flops / (r.traffic or 1): r.cell.flops / (r.median or 1) / 1e9}
            for name, r in fastest.items()
        }
        ridge = peak / bandwidth
        intensities = [ridge, *(x for point in points.values() for x in point)]
        left, right = min(intensities) / 2, max(intensities) * 2
        axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="#666666", linewidth=1.5)
        small: dict = {"textcoords": "offset points", "fontsize": 9}
        axes.annotate(f"FMA peak, {peak:.0f} GFLOP/s", (right, peak), (-4, 4), ha="right", **small)
        axes.annotate(f"{bandwidth:.0f} GB/s", (left, left * bandwidth), (14, 2), **small)
        _lines(axes, points, markersize=9, linestyle="")
        _log_log(axes, f"FLOP per byte from beyond {size_text(run.cache)} of cache", "GFLOP/s", base=10)
        axes.set_ylim(top=1.6 * peak)

    return _panels(found, f"Roofline, N = {found[0].cell.N}", panel)


def ladder(run: Run) -> Figure | None:
    """The homework's chart: the speed-up of each CUDA kernel over sequential C++ and over the kernel before.

    It shows the first case with kernels and, of a warm and a cold L2 cache, the first.
    """
    kernels = [r for r in run.results if r.cell.contender in OF_KERNEL and r.median]
    kernels = [r for r in kernels if r.cell.group == kernels[0].cell.group]
    rows = [report.row(run, r) for r in kernels]
    charts = {
        "over_sequential": "times as fast as sequential C++",
        "over_kernel_before": "times as fast as the kernel before",
    }
    charts = {name: label for name, label in charts.items() if any(row[name] for row in rows)}
    if len(kernels) < 2 or not charts:
        return None
    cell = kernels[0].cell
    figure = Figure(figsize=(1.6 + 0.75 * len(rows), 0.8 + 3.2 * len(charts)), layout="constrained")
    names = [OF_KERNEL[row["contender"]].name for row in rows]
    for axes, (name, label) in zip(figure.subplots(len(charts), 1, squeeze=False).flat, charts.items()):
        # Variants, as 3-spilled, are hatched.
        hatches = ["//" if "-" in kernel else "" for kernel in names]
        values = [row[name] or 0 for row in rows]
        bars = axes.bar(names, values, color=COLOURS[-1], edgecolor="white", hatch=hatches)
        axes.bar_label(bars, [_figure_text(value) for value in values], fontsize=9)
        axes.axhline(1, color="#666666", linewidth=1)
        axes.grid(False, axis="x")
        axes.margins(y=0.12)
        axes.set_ylabel(label, fontsize=9)
        axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel("kernel")
    shape = f"({cell.batch}, {cell.heads}, {cell.N}, {cell.d})"
    title = f"CUDA kernels at {shape}, {cell.dtype}" + ", causal" * cell.causal
    for result in run.sequential:
        if result.cell == smaller(cell) and result.median:
            scaled = sequential_seconds(cell, run.sequential)
            title += f"\n{sequential_text(result)} to {scaled:.3g} s"
    figure.suptitle(title, fontsize=9)
    return figure


def _figure_text(value: float) -> str:
    """At least three digits; '' for 0."""
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _longest(results: list[Result]) -> list[Result]:
    """The results at the longest N among them."""
    return [r for r in results if r.cell.N == max(each.cell.N for each in results)]


def _panels(
    results: list[Result],
    title: str,
    panel: Callable[[Axes, list[Result]], None],
    least: int = 1,
    by_threads: bool = True,
    legend: bool = True,
    tiled: str = "; with the best tile",
) -> Figure | None:
    """A figure with a panel for each head width and mask (and number of threads).

    least: different lengths that a panel needs. tiled: added to the title if several tiles were timed.
    None if no panel is left.
    """
    groups: dict[tuple, list[Result]] = {}
    for r in results:
        groups.setdefault((r.cell.causal, r.cell.d, r.cell.threads if by_threads else 0), []).append(r)
    groups = {key: rs for key, rs in groups.items() if len({r.cell.N for r in rs}) >= least}
    if not groups:
        return None
    counts = len({threads for _, _, threads in groups})
    across = counts if counts > 1 else min(3, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(5.2 * across + (1.6 if legend else 0), 3.9 * down + 0.5), layout="constrained")
    tiles_of_one = any(
        len({(r.cell.br, r.cell.bc) for r in rs if r.cell.N == rs[0].cell.N and r.cell.br}) > 1
        for rs in groups.values()
    )
    figure.suptitle(title + tiled * tiles_of_one, fontsize=13)
    handles: dict[str, Any] = {}
    axes = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for place, key in zip(axes, sorted(groups)):
        causal, d, threads = key
        words = [f"d = {d}"] + ["causal"] * causal + [counted(threads, "thread")] * by_threads
        place.set_title(", ".join(words), fontsize=11)
        panel(place, groups[key])
        handles |= dict(zip(*reversed(place.get_legend_handles_labels())))
    for place in axes[len(groups) :]:
        place.remove()
    if legend:
        figure.legend(list(handles.values()), list(handles), loc="outside right center")
    return figure


Points = dict[str, dict[float, float]]  # of each contender: y by x


def _points(results: list[Result], x: str, y: Callable[[Result], float], choose: Callable) -> Points:
    """Points by a field of the cell; `choose` selects among several tiles or SIMD helpers."""
    found: Points = {}
    for r in results:
        points, at = found.setdefault(r.cell.contender, {}), getattr(r.cell, x)
        points[at] = choose(points.get(at, y(r)), y(r))
    return found


def _lines(axes: Axes, found: Points, **settings: Any) -> None:
    for name, points in found.items():
        xs = sorted(points)
        arguments = look(name) | {"label": contenders()[name].title} | settings
        axes.plot(xs, [points[x] for x in xs], **arguments)


def _log_log(axes: Axes, x: str, y: str, base: int = 2) -> None:
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, _: f"{number:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set(xlabel=x, ylabel=y)


PICTURES: dict[str, Callable[[Run], Figure | None]] = {
    **{"time": time, "tiles": tiles, "roofline": roofline},
    **{"threads": scaling, "memory": memory, "ladder": ladder},
}
