"""gpt.py bench --plot: a run as pictures, SVG and PNG.

Contenders differ by marker and line as well as by colour (Okabe & Ito's palette, for colour-blind readers),
so that a picture is legible in black and white.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lab.bench import report, sequential
from lab.bench.cases import OF_KERNEL
from lab.bench.contenders import contenders
from lab.bench.results import Result, Run
from lab.text import size_text

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
except ImportError:
    raise ValueError("--plot needs Matplotlib: pip install -c constraints.txt -e '.[lab]'") from None

# Colour, marker and line of the contenders that are not parts.
OTHER_LOOKS = {"sdpa": ("#CC79A7", "X", "--"), "onnx": ("#56B4E9", "P", "-.")}
# The others take these in the order of contenders(); of different lengths, so that no look soon comes again.
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


def look(contender: str) -> tuple[str, str, str]:
    """A contender's colour, marker and line."""
    if contender in OTHER_LOOKS:
        return OTHER_LOOKS[contender]
    number = [name for name in contenders() if name not in OTHER_LOOKS].index(contender)
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], LINES[number % len(LINES)]


def draw(run: Run, directory: Path) -> list[Path]:
    """Draw every picture that the run has figures for; return the written files."""
    pictures: dict[str, Callable[[Run], Figure | None]] = {
        "time": time,
        "tiles": tiles,
        "roofline": roofline,
        "threads": scaling,
        "memory": memory,
        "ladder": ladder,
    }
    written = []
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        for name, picture in pictures.items():
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
        for name, points in _by_contender(results, lambda r: r.median and 1e3 * r.median, min).items():
            _line(axes, name, points)
        _log_log(axes, "N, keys and queries", "ms a call")

    return _panels(run, "Time of attention by length", panel, lambda r: bool(r.seconds), 2)


def memory(run: Run) -> Figure | None:
    """Scratch against N, log-log."""

    def panel(axes: Axes, results: list[Result]) -> None:
        for name, points in _by_contender(results, lambda r: r.scratch or None, max).items():
            _line(axes, name, points)
        _log_log(axes, "N, keys and queries", "scratch")
        axes.yaxis.set_major_locator(LogLocator(base=16))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(size)))

    title, largest = "Memory beyond the output by length", "; with the largest tile"
    return _panels(run, title, panel, lambda r: bool(r.scratch), 2, tiled=largest)


def scaling(run: Run) -> Figure | None:
    """Speed-up over the fewest threads, at the longest N; a panel for each head width."""
    counts = sorted({r.cell.threads for r in run.results if r.seconds})
    if len(counts) < 2:
        return None
    longest = max(r.cell.N for r in run.results if r.seconds)

    def panel(axes: Axes, results: list[Result]) -> None:
        points = _by_contender(results, lambda r: r.median, min, lambda r: r.cell.threads)
        axes.plot(counts, [c / counts[0] for c in counts], color="#999999", linewidth=1, label="ideal")
        for name, times in points.items():
            if counts[0] in times:
                _line(axes, name, {c: times[counts[0]] / t for c, t in times.items()})
        axes.set_xticks(counts)
        axes.set_xlabel("threads")
        axes.set_ylabel(f"speed, {counts[0]} thread{'s' * (counts[0] > 1)} = 1")

    title = f"Speed by threads, N = {longest}"
    return _panels(run, title, panel, lambda r: bool(r.seconds) and r.cell.N == longest, 1, by_threads=False)


def tiles(run: Run) -> Figure | None:
    """Speed by tile, as a share of the best tile's, of the first tiled part at the longest N."""
    timed = [r for r in run.results if r.cell.br and r.seconds]
    if not timed:
        return None
    name, longest = timed[0].cell.contender, max(r.cell.N for r in timed)
    timed = [r for r in timed if r.cell.contender == name and r.cell.N == longest]
    rows, columns = (sorted({getattr(r.cell, side) for r in timed}) for side in ("br", "bc"))
    by_threads: dict[int, set] = {}  # whose number may decide the tile that is taken unless one is asked for
    for r in timed:
        by_threads.setdefault(r.cell.threads, set()).add((r.cell.br, r.cell.bc))
    if max(len(tried) for tried in by_threads.values()) < 2:
        return None

    def panel(axes: Axes, results: list[Result]) -> None:
        best = min(r.median for r in results if r.median)
        share: list[list[float]] = [[0.0] * len(columns) for _ in rows]
        for r in results:
            if r.median:  # of several SIMD helpers the fastest
                row, column = rows.index(r.cell.br), columns.index(r.cell.bc)
                share[row][column] = max(100 * best / r.median, share[row][column])
        axes.grid(False)
        shown = [[value or float("nan") for value in values] for values in share]
        axes.imshow(shown, cmap="cividis", vmin=50, vmax=100, origin="lower", aspect="auto")
        for i, values in enumerate(share):
            for j, value in enumerate(values):
                if value:
                    colour = "black" if value > 75 else "white"
                    axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(columns)), [str(c) for c in columns])
        axes.set_yticks(range(len(rows)), [str(r) for r in rows])
        axes.set_xlabel("Bc, keys")
        axes.set_ylabel("Br, queries")

    title = f"Speed of {name} by tile, N = {longest}, in % of the best"
    keep = {id(r) for r in timed}
    return _panels(run, title, panel, lambda r: id(r) in keep, 2, legend=False, tiled="")


def roofline(run: Run) -> Figure | None:
    """Each part's speed over its arithmetic intensity, at the longest N, under this machine's limits.

    Williams, Waterman & Patterson 2009 (doi:10.1145/1498765.1498785). Bytes are the part's own count of
    transfers into the last of a core's own caches.
    """
    counted = [r for r in run.results if r.seconds and r.traffic and r.cell.device == "cpu"]
    if not counted:
        return None
    longest = max(r.cell.N for r in counted)

    def panel(axes: Axes, results: list[Result]) -> None:
        threads = results[0].cell.threads
        peak, bandwidth = run.peaks[threads] / 1e9, run.bandwidths[threads] / 1e9
        best: dict[str, Result] = {}
        for r in results:
            fastest = best.setdefault(r.cell.contender, r)
            if r.median and fastest.median and r.median < fastest.median:
                best[r.cell.contender] = r
        points = {
            name: (r.cell.flops / r.traffic, r.cell.flops / r.median / 1e9)
            for name, r in best.items()
            if r.traffic and r.median
        }
        ridge = peak / bandwidth
        left = min([ridge, *(x for x, _ in points.values())]) / 2
        right = max([ridge, *(x for x, _ in points.values())]) * 2
        axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="#666666", linewidth=1.5)
        axes.annotate(
            f"FMA peak, {peak:.0f} GFLOP/s",
            (right, peak),
            (-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        axes.annotate(
            f"{bandwidth:.0f} GB/s", (left, left * bandwidth), (14, 2), textcoords="offset points", fontsize=9
        )
        for name, (x, y) in points.items():
            colour, marker, _ = look(name)
            axes.plot(
                [x],
                [y],
                color=colour,
                marker=marker,
                markersize=9,
                linestyle="",
                label=contenders()[name].title,
            )
        _log_log(axes, "", "GFLOP/s")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_ylim(top=1.6 * peak)
        axes.set_xlabel(f"FLOP per byte from beyond {size_text(run.cache)} of cache")

    title = f"Roofline, N = {longest}"
    keep = {id(r) for r in counted if r.cell.N == longest}
    return _panels(run, title, panel, lambda r: id(r) in keep, 1)


def ladder(run: Run) -> Figure | None:
    """The homework's chart: the speed-up of each CUDA kernel over sequential C++ and over the kernel before.

    It shows the first case with kernels and, of a warm and a cold L2 cache, the first.
    """
    kernels = [r for r in run.results if r.cell.contender in OF_KERNEL and r.median]
    kernels = [r for r in kernels if r.cell.group == kernels[0].cell.group]
    if len(kernels) < 2:
        return None
    rows = [report.row(run, r) for r in kernels]
    cell = kernels[0].cell
    charts = {
        "over_sequential": "times as fast as sequential C++",
        "over_kernel_before": "times as fast as the kernel before",
    }
    charts = {name: label for name, label in charts.items() if any(row[name] for row in rows)}
    if not charts:
        return None
    figure = Figure(figsize=(1.6 + 0.75 * len(rows), 0.8 + 3.2 * len(charts)), layout="constrained")
    names = [OF_KERNEL[row["contender"]].name for row in rows]
    for axes, (name, label) in zip(figure.subplots(len(charts), 1, squeeze=False).flat, charts.items()):
        values = [row[name] or 0 for row in rows]
        # Variants, as 3-spilled, are hatched.
        hatches = ["//" if "-" in kernel else "" for kernel in names]
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
        if result.cell == sequential.smaller(cell) and result.median:
            scaled = sequential.seconds(cell, run.sequential)
            title += f"\n{sequential.text(result)} to {scaled:.3g} s"
    figure.suptitle(title, fontsize=9)
    return figure


def _figure_text(value: float) -> str:
    """At least three digits; '' for 0."""
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _panels(
    run: Run,
    title: str,
    panel: Callable[[Axes, list[Result]], None],
    fits: Callable[[Result], bool],
    least: int,
    by_threads: bool = True,
    legend: bool = True,
    tiled: str = "; with the best tile",
) -> Figure | None:
    """A figure with a panel for each head width and mask (and number of threads), of the results that fit.

    least: different lengths that a panel needs. tiled: added to the title if several tiles were timed.
    None if no panel is left.
    """
    groups: dict[tuple, list[Result]] = {}
    for r in run.results:
        if fits(r):
            key = (r.cell.causal, r.cell.d, r.cell.threads if by_threads else 0)
            groups.setdefault(key, []).append(r)
    if legend and least > 1:
        groups = {key: rs for key, rs in groups.items() if len({r.cell.N for r in rs}) >= least}
    if not groups:
        return None
    counts = len({key[2] for key in groups})
    across = counts if counts > 1 else min(3, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(5.2 * across + (1.6 if legend else 0), 3.9 * down + 0.5), layout="constrained")
    tiles_of_one = any(
        len({(r.cell.br, r.cell.bc) for r in rs if r.cell.N == rs[0].cell.N and r.cell.br}) > 1
        for rs in groups.values()
    )
    figure.suptitle(title + tiled * tiles_of_one, fontsize=13)
    axes = figure.subplots(down, across, squeeze=False, sharey=True)
    for place, key in zip(axes.flat, sorted(groups)):
        causal, d, threads = key
        words = [f"d = {d}"] + ["causal"] * causal
        words += [f"{threads} thread{'s' * (threads > 1)}"] * by_threads
        place.set_title(", ".join(words), fontsize=11)
        panel(place, groups[key])
    for place in axes.flat[len(groups) :]:
        place.remove()
    if legend:
        handles = {}
        for place in axes.flat[: len(groups)]:
            handles.update({label: handle for handle, label in zip(*place.get_legend_handles_labels())})
        figure.legend(handles.values(), handles.keys(), loc="outside right center")
    return figure


def _by_contender(
    results: list[Result],
    value: Callable[[Result], float | None],
    choose: Callable,
    along: Callable[[Result], int] = lambda r: r.cell.N,
) -> dict[str, dict[int, float]]:
    """Contender -> N -> value; `choose` selects among several tiles or SIMD helpers."""
    found: dict[str, dict[int, float]] = {}
    for r in results:
        number = value(r)
        if number is not None:
            at = found.setdefault(r.cell.contender, {})
            at[along(r)] = choose(at.get(along(r), number), number)
    return found


def _line(axes: Axes, name: str, points: dict[int, float]) -> None:
    colour, marker, line = look(name)
    xs = sorted(points)
    axes.plot(
        xs,
        [points[x] for x in xs],
        color=colour,
        marker=marker,
        linestyle=line,
        label=contenders()[name].title,
    )


def _log_log(axes: Axes, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _plain(number: float, _: int) -> str:
    return f"{number:g}"
