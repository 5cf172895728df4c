"""bench: the parts and their competitors, timed over a sweep."""

import time
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, progress, to_type
from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.parts import DEVICES, is_file
from shakespeare.lab.bench.sweep import MIN_TIME_SECONDS, ROUNDS, Sweep

if TYPE_CHECKING:  # they import torch
    from shakespeare.lab.bench.plan import Cell
    from shakespeare.lab.bench.results import Run

# Operations per second, to weight the cells of the progress bar.
ASSUMED_FLOPS = {"cpu": 5e10, "cuda": 2e13, "webgpu": 1e11}
MASKS = ("none", "causal")
# The case of the lab's homework.
ON_CUDA: dict[str, Any] = {"lengths": (4096,), "heads": 1, "batch": 100}
# For options.refuse_combinations().
ONLY_WITH = {"show": "tune", "budget": "tune", "fail_on_regression": "compare", "threshold": "compare"}
CASES = tuple(field.name for field in fields(Sweep))
MEASURING = ("contenders", "queries", "dtype", "device", "rounds", "min_time", "save")
NOT_WITH = {
    "compare": ("form", "dry_run"),
    "dry_run": ("save", "plot", "form", "tune"),
    "causal": ("masks",),
    "tokens": ("batch",),
    "columns": ("heads",),
    "backward": ("queries", "plot", "tune"),
    "load": (*CASES, "causal", *MEASURING, "dry_run", "tune"),
    "tune": (*MEASURING, "form", "compare", "plot", "rules"),
}

L2 = "On CUDA, what the L2 cache holds before a call: what the last call left, or other data."
RULES = "Rules, such as none,window=255,alibi+softcap=30; also documents=KEYS, sinks and bias."
LOAD = "Show the run in this file instead of measuring, or rank what try saved: a file .jsonl, or a folder."

sweep_options = options.all_of(
    click.argument("contenders", type=options.Names(files=True), required=False, metavar="[CONTENDERS]"),
    options.numbers("-N", "lengths", "Numbers of keys.", default="1024", show_default="1024; 4096 on CUDA"),
    options.numbers("-d", "widths", "Head widths.", maximum=options.WIDEST_HEAD, default="32"),
    options.numbers("-br", "--br", "Rows of part4's tiles, in queries.", auto=True, default="auto"),
    options.numbers("-bc", "--bc", "Columns of part4's tiles, in keys.", auto=True, default="auto"),
    options.some_threads,
    options.simds,
    options.names("--mask", "masks", f"Masks, from {', '.join(MASKS)}.", choices=MASKS, default="none"),
    options.option("--rules", RULES, default="none"),
    options.flag("--causal", "The same as --mask causal."),
    options.flag("--backward", "Time the gradients, which part0, part4 and others' attention have."),
    options.size("--queries", "Number of queries.", show_default="as many as keys"),
    options.heads(default=4, show_default="4; 1 on CUDA"),
    options.batch(default=1, show_default="1; 100 on CUDA"),
    options.size("--tokens", "Keys of a batch: its size is TOKENS / N.", show_default="by --batch"),
    options.size("--columns", "Columns of all heads: there are COLUMNS / d.", show_default="by --heads"),
    options.dtype,
    options.device,
    options.names("--l2", "l2s", L2, default="warm,cold"),
)
run_options = options.all_of(
    options.integer(
        "-r", "--rounds", "Times each contender is timed.", minimum=2, maximum=10**6, default=ROUNDS
    ),
    options.number(
        "--min-time", "Seconds of timing per contender, at least.", maximum=3600, default=MIN_TIME_SECONDS
    ),
    options.choice(
        "-o", "--output", "form", "Format of the results.", choices=("md", "csv", "json", "jsonl")
    ),
    options.flag("--dry-run", "Print what would be measured."),
    options.save("bench", "the run"),
    options.option("--load", LOAD, type=click.Path(exists=True, path_type=Path)),
    options.file("--compare", "Show significant differences from the run in this file.", exists=True),
    options.number("--threshold", "Smallest difference that --compare shows, in %.", maximum=100, default=5),
    options.flag("--fail-on-regression", "Exit with 1 if --compare finds a slower result."),
    options.folder("--plot", "Draw the results into this directory."),
)
tune_options = options.all_of(
    options.flag("--tune", "Find part4's fastest tiles and keep them for auto."),
    options.number("--budget", "Seconds of --tune for all cases.", maximum=86400, above=True, default=60),
    options.flag("--show", "With --tune: print the kept tiles instead of measuring."),
)


@click.command()
@sweep_options
@run_options
@tune_options
@options.gathered("sweep", Sweep, (name for name in CASES if name not in ("masks", "rules")))
def bench(
    sweep: Sweep,
    contenders: tuple[str, ...] | None,
    masks: tuple[str, ...],
    rules: str,
    causal: bool,
    rounds: int,
    min_time: float,
    form: str,
    dry_run: bool,
    save: str | None,
    load: Path | None,
    compare: Path | None,
    threshold: float,
    fail_on_regression: bool,
    plot: Path | None,
    tune: bool,
    budget: float,
    show: bool,
) -> bool:
    """Time CONTENDERS over a sweep: part0 to part4, sdpa (PyTorch's), onnx (ONNX Runtime's), flex
    (PyTorch's FlexAttention, compiled).

    Lists are 32,64 and ranges 1:9+2 or 256:4096*2. Each result is checked against float64 before it is
    timed, and the exit code is 1 if one is wrong. A contender that fails is skipped, with the reason. The
    contenders of a case are timed in turn. The default CONTENDERS are sdpa and all parts that take the dtype.

    With --device cuda they are part0, part4 (its fastest kernel), kernel1 and the other kernels
    (kernel2-unpadded, ...), sdpa-math, sdpa-efficient, sdpa-flash and sdpa-cudnn (backends of PyTorch's),
    flash-attn, flash-attn-3 and flash-attn-4 if installed, and flex; by default all but flex, each once.
    With --backward flash-attn-4-deterministic is one too: its sums have one order, as this project's.
    --plot then also times part1 on one core of the CPU. With --device webgpu they are part4 and its steps in
    WGSL, webgpu1 to webgpu6.
    """
    options.check()
    options.refuse_combinations(ONLY_WITH, NOT_WITH)
    if load and (load.is_dir() or load.suffix == ".jsonl"):
        from shakespeare.judge import ranking

        options.refuse(("compare", "plot"), "does not go with a ranking")
        click.echo(ranking.text(ranking.ranking(ranking.entries(load)), form))
        return True
    from shakespeare.lab import result_files
    from shakespeare.lab.bench import compare as comparing
    from shakespeare.lab.bench import plan, report

    if show:
        from shakespeare.attention_ext import default_tile, processor
        from shakespeare.lab.bench import tune as tuning

        tuned = default_tile.read()
        file = default_tile.path()
        shown = f"{tuning.text(tuned)}\n\nFrom {file}, for {processor.name()}."
        click.echo(shown if tuned else f"Nothing is kept for this processor in {file}.")
        return True
    if save and contenders is None:
        if {*save.split(",")} <= {name for device in DEVICES for name in plan.known_on(device)}:
            raise click.UsageError(f"--save is {save!r}; it must be a file; CONTENDERS come before --save")
    sweep = replace(
        sweep,
        masks=[True] if causal else [mask == "causal" for mask in masks],
        rules=rules.split(","),
    )
    cells = [] if load else planned(sweep, contenders, tune)
    if dry_run:
        click.echo(report.plan_text(cells, rounds))
        return True
    if tune:
        rows, columns = ([n for n in sides if n] for sides in (sweep.br, sweep.bc))
        find_tiles(cells, budget, rows, columns)
        return True
    old = report.load(load) if load else None
    if old:
        cells = [result.cell for result in old.results]
        rounds = old.rounds
    if save:
        result_files.check_file(save)
    before = report.load(compare) if compare else None
    if before:
        comparing.check(before, cells, rounds)
    if plot:
        from shakespeare.lab.bench import plots

        plot.mkdir(parents=True, exist_ok=True)
    run, stopped = (old, False) if old else measured(cells, rounds, min_time, plot is not None)

    if save and any(result.seconds for result in run.results):  # else the file may hold another run
        report.save(run, Path(save))
    click.echo(report.text(run, form))
    slower = False
    if before:
        share = threshold / 100
        compared = comparing.compare(before, run, share)
        click.echo("\n" + comparing.text(compared, before, run, share))
        slower = compared.worse
    for sentence in filter(None, (run.busy, report.infirm(run))):
        notice(sentence)
    for file in plots.draw(run, plot) if plot else ():
        notice(f"wrote {file}")
    if stopped:
        raise KeyboardInterrupt
    wrong = not old and any(result.status == "wrong" for result in run.results)
    return not wrong and not (slower and fail_on_regression)


def measured(cells: list["Cell"], rounds: int, min_time: float, against_cpu: bool) -> tuple["Run", bool]:
    """The run of a sweep, and whether Ctrl-C stopped it. against_cpu: also time sequential C++."""
    from shakespeare.lab.bench.gpu_bench import GpuBench
    from shakespeare.lab.bench.runner import Bench
    from shakespeare.lab.webgpu.device import Gpu

    bench: Bench | GpuBench
    device = cells[0].device
    if device == "cpu":
        bench = Bench(cells, rounds, min_time)
    else:
        gpu = Gpu() if device == "webgpu" else None
        bench = GpuBench(cells, rounds, min_time, against_cpu=against_cpu, gpu=gpu)
    # A cell's time is unknown; its operations and the requested least time are known.
    weight = {cell: max(min_time, rounds * cell.flops / ASSUMED_FLOPS[device]) / rounds for cell in cells}
    try:
        with progress(times=True) as (update, _), closing(bench.run()) as cells_done:
            update(total=sum(weight.values()) * (1 + rounds))  # verified, timed
            for cell in cells_done:
                what = f"measuring {cell.contender}{' again' if bench.again else ''}"
                update(advance=0 if bench.again else weight[cell], description=what)
    except KeyboardInterrupt:
        return bench.done, True
    return bench.done, False


def find_tiles(cells: list["Cell"], budget: float, br: list[int], bc: list[int]) -> None:
    """Tune and keep each cell's tile within `budget` seconds in all. br, bc: sides to try; empty for all."""
    from shakespeare.attention_ext import default_tile
    from shakespeare.lab.bench import tune
    from shakespeare.lab.bench.plan import check_memory

    check_memory(cells)
    tuned = []
    try:
        with progress(times=True) as (update, _):
            update(total=budget)
            for cell in cells:
                best = None
                start = time.perf_counter()
                for best in tune.tune(cell, budget / len(cells), tune.candidates(cell.N, br, bc)):
                    what = f"tuning N={cell.N}, d={cell.d}: {best.br} x {best.bc}"
                    update(advance=time.perf_counter() - start, description=what)
                    start = time.perf_counter()
                if best:
                    tuned.append(best)
    finally:  # Ctrl-C keeps the finished cells
        if tuned:
            click.echo(tune.text(tuned))
            default_tile.write(tuned)
            click.echo(f"\nKept in {default_tile.path()} for part4's auto tiles on this processor.")


def planned(sweep: Sweep, contenders: tuple[str, ...] | None, tune: bool) -> list["Cell"]:
    """The cells of a sweep; with --tune those of the tiled parts, without tiles."""
    from shakespeare.lab.bench import plan

    tiled = tuple(name for name, part in PARTS.items() if part.tiled)
    if sweep.device == "cuda":
        sweep = replace(sweep, **{name: n for name, n in ON_CUDA.items() if not options.is_given(name)})
    names = tiled if tune else contenders
    if names is None:
        names = plan.default_names(sweep.dtype, sweep.device, sweep.queries, sweep.backward)
    if tune:
        sweep = replace(sweep, br=(None,), bc=(None,))
    if not {*tiled} & {*names} and (*sweep.br, *sweep.bc) != (None, None):
        raise click.UsageError(f"-br and -bc go with {', '.join(tiled)} only, which has tiles")
    cells = plan.plan(names, sweep)
    for name in filter(is_file, names):
        notice(f"{name} runs in the process that measures; {to_type()} try {name} has a judge.")
    return cells
