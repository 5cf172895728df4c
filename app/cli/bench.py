"""The command bench: its options, the options that exclude each other, and its plan."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from app.cli.options import (
    MOST_HEADS,
    MOST_THREADS,
    WIDEST_HEAD,
    Names,
    Numbers,
    all_of,
    device_option,
    dtype_option,
    notice,
    on_command_line,
    refuse_options_of_the_other_device,
    save_option,
    size_option,
    take,
    warned_of_threads,
)
from attention_ext import PARTS, SIMD

TILED = tuple(name for name, part in PARTS.items() if part.tiled)


@dataclass(frozen=True)
class SweepOptions:
    """What bench times. The fields are those of cases.plan(), except that `masks` are names."""

    contenders: tuple[str, ...] | None
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    br: tuple[int | None, ...]
    bc: tuple[int | None, ...]
    threads: tuple[int, ...]
    simds: tuple[str, ...]
    masks: tuple[str, ...]
    queries: int | None
    heads: int
    batch: int
    dtype: str
    device: str
    l2s: tuple[str, ...]


@dataclass(frozen=True)
class RunOptions:
    """How bench times, unless it loads a run from a file."""

    rounds: int
    min_time: float
    saved: str | None
    dry_run: bool


@dataclass(frozen=True)
class ResultOptions:
    """Where bench's results go and what they are compared with."""

    form: str
    save: str | None
    compare: str | None
    threshold: float
    fail_on_regression: bool
    plot: str | None


@dataclass(frozen=True)
class TuneOptions:
    """Whether bench tunes part4's tiles instead."""

    tune: bool
    budget: float
    show: bool


sweep_options = all_of(
    click.argument("contenders", type=Names(), required=False, metavar="[CONTENDERS]"),
    click.option(
        "-N",
        "lengths",
        type=Numbers(),
        default="1024",
        show_default="1024; 4096 on CUDA",
        help="Numbers of keys.",
    ),
    click.option(
        "-d", "widths", type=Numbers(WIDEST_HEAD), default="32", show_default=True, help="Head widths."
    ),
    click.option(
        "-br",
        "--br",
        type=Numbers(auto=True),
        default="auto",
        show_default=True,
        help="Rows of part4's tiles, in queries.",
    ),
    click.option(
        "-bc",
        "--bc",
        type=Numbers(auto=True),
        default="auto",
        show_default=True,
        help="Columns of part4's tiles, in keys.",
    ),
    click.option(
        "-t",
        "--threads",
        type=Numbers(MOST_THREADS),
        default="1",
        show_default=True,
        help="Numbers of threads.",
        callback=warned_of_threads,
    ),
    click.option(
        "--simd",
        "simds",
        type=Names(),
        default="auto",
        show_default=True,
        help=f"SIMD helpers of attention's forward pass, from {', '.join(SIMD)}.",
    ),
    click.option(
        "--mask", "masks", type=Names(), default="none", show_default=True, help="Masks, from none, causal."
    ),
    click.option("--causal", is_flag=True, help="The same as --mask causal."),
    size_option("--queries", show_default="as many as keys", help="Number of queries."),
    size_option("--heads", default=4, most=MOST_HEADS, show_default="4; 1 on CUDA", help="Number of heads."),
    size_option(
        "-B", "--batch", default=1, most=MOST_HEADS, show_default="1; 100 on CUDA", help="Batch size."
    ),
    dtype_option,
    device_option,
    click.option(
        "--l2",
        "l2s",
        type=Names(),
        default="warm,cold",
        show_default=True,
        help="On CUDA, what the L2 cache holds before a call: what the last call left, or other data.",
    ),
)
run_options = all_of(
    click.option(
        "-r",
        "--rounds",
        type=click.IntRange(2, 10**6),
        default=10,
        show_default=True,
        help="Number of times that each contender is timed.",
    ),
    click.option(
        "--min-time",
        type=click.FloatRange(0, 3600),
        default=0.2,
        show_default=True,
        help="Seconds of timing per contender, at least.",
    ),
)
result_options = all_of(
    click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(["md", "csv", "json", "jsonl"]),
        default="md",
        show_default=True,
        help="Format of the results.",
    ),
    click.option("--dry-run", is_flag=True, help="Print what would be measured."),
    save_option("bench", "the run"),
    click.option(
        "--load",
        "saved",
        type=click.Path(exists=True, dir_okay=False),
        help="Show the run in this file instead of measuring.",
    ),
    click.option(
        "--compare",
        type=click.Path(exists=True, dir_okay=False),
        help="Show significant differences from the run in this file.",
    ),
    click.option(
        "--threshold",
        type=click.FloatRange(0, 100),
        default=5,
        show_default=True,
        help="Smallest difference that --compare shows, in percent.",
    ),
    click.option(
        "--fail-on-regression", is_flag=True, help="Exit with 1 if --compare finds a slower result."
    ),
    click.option("--plot", type=click.Path(file_okay=False), help="Draw the results into this directory."),
)
tune_options = all_of(
    click.option("--tune", is_flag=True, help="Find part4's fastest tiles and keep them for auto."),
    click.option(
        "--budget",
        type=click.FloatRange(0, 86400, min_open=True),
        default=60,
        show_default=True,
        help="Seconds that --tune takes, for all cases together.",
    ),
    click.option("--show", is_flag=True, help="With --tune: print the kept tiles instead of measuring."),
)


@click.command()
@sweep_options
@run_options
@result_options
@tune_options
@click.pass_context
def bench(given: click.Context, /, **options) -> None:
    """Time CONTENDERS over a sweep: part0 to part4, sdpa (PyTorch's), onnx (ONNX Runtime's).

    Lists are 32,64 and ranges 1:9+2 or 256:4096*2. Each result is checked against float64 before it is
    timed. The contenders of a case are timed in turn. The default CONTENDERS are sdpa and all
    parts that take the dtype.

    With --device cuda they are part0, part4 (its fastest step), step1 and the other steps (step2-unpadded,
    ...), numba-spilled, numba-registers, sdpa-math, sdpa-efficient, sdpa-flash, sdpa-cudnn (backends of
    PyTorch's) and flash-attn; by default all that are installed, each once. --plot then also times part1 on
    one core of the CPU.
    """
    refuse_options_that_do_nothing(given)
    if options["device"] == "cuda":
        options |= {name: size for name, size in ON_CUDA.items() if not on_command_line(given, name)}
    if options.pop("causal"):
        options["masks"] = ("causal",)
    tuning, sizes = take(TuneOptions, options), take(SweepOptions, options)
    if tuning.show:
        from lab.bench import sweep

        click.echo(sweep.tuned_text())
        return
    measure_attention(sizes, take(RunOptions, options), take(ResultOptions, options), tuning)


def measure_attention(
    sizes: SweepOptions, timing: RunOptions, results: ResultOptions, tuning: TuneOptions
) -> None:
    """Time attention, tune it, or print the plan."""
    from lab.bench import cases, report, sweep

    if (
        results.save
        and sizes.contenders is None
        and {*results.save.split(",")} <= {*cases.known_on("cpu"), *cases.known_on("cuda")}
    ):
        raise click.UsageError(
            f"--save is {results.save!r}; it must be a file; CONTENDERS come before --save"
        )
    cells = [] if timing.saved else plan_of(sizes, tuning.tune)
    rounds = timing.rounds
    if timing.dry_run:
        click.echo(sweep.plan_text(cells, rounds))
        return
    if tuning.tune:
        rows, columns = ([n for n in side if n] for side in (sizes.br, sizes.bc))
        sweep.find_tiles(cells, tuning.budget, rows, columns, click.echo)
        return
    old = report.load(Path(timing.saved)) if timing.saved else None
    if old:
        cells, rounds = [result.cell for result in old.results], old.rounds
    # Wrong options are reported before anything is measured.
    out = sweep.Output(
        cells,
        rounds,
        form=results.form,
        save=results.save,
        old=results.compare,
        threshold=results.threshold / 100,
        plot=results.plot,
    )
    against_cpu = results.plot is not None
    run, stopped = (old, False) if old else sweep.measure(cells, rounds, timing.min_time, against_cpu)
    slower = out.show(run, click.echo, notice)
    if stopped:
        raise KeyboardInterrupt
    if slower and results.fail_on_regression:
        sys.exit(1)


def plan_of(sizes: SweepOptions, tune: bool) -> list:
    """The cells of a sweep, from lab.bench.cases.plan(). With `tune`: those of TILED, without tiles."""
    from lab.bench import cases

    if not set(sizes.masks) <= {"none", "causal"}:
        raise click.UsageError(f"--mask is {','.join(sizes.masks)!r}; it must be of none, causal")
    settings = asdict(sizes)
    settings["masks"] = [mask == "causal" for mask in settings.pop("masks")]
    names = settings.pop("contenders") or cases.default_names(sizes.dtype, sizes.device, sizes.queries)
    if tune:
        names = TILED
        settings |= {"br": (None,), "bc": (None,)}
    if not set(TILED) & set(names) and (*sizes.br, *sizes.bc) != (None, None):
        raise click.UsageError(f"-br and -bc go with {', '.join(TILED)} only, which has tiles")
    return cases.plan(names, **settings)


# The case of the lab's homework.
ON_CUDA = {"lengths": (4096,), "heads": 1, "batch": 100}
# Options of bench that need another option, and options that another one excludes.
ONLY_WITH = {"show": "tune", "budget": "tune", "fail_on_regression": "compare", "threshold": "compare"}
SWEEP = (*SweepOptions.__dataclass_fields__, "causal")
NOT_WITH = {
    "compare": ("form", "dry_run"),
    "dry_run": ("save", "plot", "form", "tune"),
    "causal": ("masks",),
    "saved": (*SWEEP, "rounds", "min_time", "save", "dry_run", "tune"),
    "tune": (
        "contenders",
        "dtype",
        "device",
        "queries",
        "rounds",
        "min_time",
        "form",
        "save",
        "compare",
        "plot",
    ),
}


def refuse_options_that_do_nothing(context: click.Context) -> None:
    """Raise UsageError for an option of bench that would be ignored."""
    given = {
        str(p.name): p.opts[0] if isinstance(p, click.Option) else "CONTENDERS"
        for p in context.command.params
        if on_command_line(context, str(p.name))
    }
    refuse_options_of_the_other_device()
    for name, needed in ONLY_WITH.items():
        if name in given and needed not in given:
            raise click.UsageError(f"{given[name]} goes with --{needed} only")
    for name, useless in NOT_WITH.items():
        for other in useless:
            if name in given and other in given:
                raise click.UsageError(f"{given[other]} does not go with {given[name]}")
