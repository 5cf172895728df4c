"""The forms of a run: Markdown, CSV, JSON and JSON lines; the file that keeps it; the plan of a sweep.

A file that another program wrote or damaged is refused.
"""

import csv
import io
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shakespeare.attention_ext import SIMD
from shakespeare.attention_ext.parts import DEVICES, Dtype
from shakespeare.lab import result_files
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.contenders import SDPA, contenders
from shakespeare.lab.bench.gpu_bench import sequential_seconds, sequential_text
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.bench.sweep import L2
from shakespeare.lab.formats import counted, markdown, scaled, size_text
from shakespeare.lab.timing import FIRM_MARGIN, interval, quartiles

FORMAT = 4  # version of as_json()
READABLE = (2, 3, FORMAT)  # format 2 has no traffic, format 3 no device
MAX_NAMED = 3  # cells that infirm() names
MAX_RULED_KEYS = 2**22  # keys of a cell with rules in a file: each query's range of them is made
# The baselines of "over ..." columns; the fastest one counts.
BASELINES: dict[str, tuple[str, ...]] = {"part0": ("part0",), "sdpa": ("sdpa", *SDPA), "onnx": ("onnx",)}
# Repeated in each row of CSV and JSON lines.
MACHINE_COLUMNS = ("cpu", "isa", "simd_name", "torch", "commit", "date")

# Columns that identify a cell. In Markdown the columns that are the same in all rows stand above the table.
_CASE = "simd N queries d batch heads causal dtype br bc threads device l2 rules backward".split()
CASE = {
    **dict(zip(_CASE, _CASE)),
    "simd": "SIMD",
    "causal": "mask",
    "br": "Br",
    "bc": "Bc",
    "l2": "L2",
    "backward": "pass",
}
# A row's figures, with titles and formats in Markdown ('' takes three digits); None if not shown there.
FIGURES = {
    "ms": ("ms", ""),
    "iqr_ms": ("IQR, ms", ""),
    "low_ms": None,
    "high_ms": None,
    "margin": ("± %", "percent"),
    "quiet": ("quiet", ""),
    "all_ms": ("all, ms", ""),
    "gflops": ("GFLOP/s", ""),
    "tflops": ("TFLOP/s", ""),
    "peak_share": ("of peak", ".0%"),
    "gbps": ("GB/s", ""),
    "bandwidth_share": ("of bandwidth", ".0%"),
    "reading_share": ("of reading", ".0%"),
    "scratch": ("scratch", ","),
    "over_part0": ("over part0", ""),
    "over_sdpa": ("over SDPA", ""),
    "over_onnx": ("over ONNX Runtime", ""),
    "over_kernel_before": ("over kernel before", ""),
    "over_sequential": ("over C++", ""),
    "error": ("error", ".0e"),
}
SHOWN = {name: shown for name, shown in FIGURES.items() if shown}


def row(run: Run, result: Result) -> dict:
    """A result as a flat row of figures; None for missing ones.

    ms, iqr_ms: median and interquartile range. low_ms, high_ms: the median's interval(); margin: half its
    width over the median. quiet: how many rounds were; all_ms: the median of all. gbps: 10^9 bytes per second
    into the last private cache, by the part's count; on a GPU those of q, k, v and the output, if that takes
    longer than the arithmetic. reading_share: time of a launch that only reads these bytes, over the call's.
    over_part0, over_sdpa, over_onnx: the speed over that contender of the group, the fastest of SDPA's
    backends. over_kernel_before: over the previous number. over_sequential: over part1 on one core.
    """
    cell = result.cell
    median = result.median
    named = asdict(cell) | {"status": result.status, "note": result.note}
    figures: dict = dict.fromkeys(FIGURES) | {"error": result.error, "scratch": result.scratch}
    if median is None:
        return named | figures
    first, third = quartiles(result.counted)
    low, high = interval(result.counted)
    rate = cell.flops / median
    figures.update(
        ms=1e3 * median,
        iqr_ms=1e3 * (third - first),
        low_ms=1e3 * low,
        high_ms=1e3 * high,
        margin=result.margin,
        quiet=result.quiet if cell.device == "cpu" else None,
        all_ms=1e3 * statistics.median(result.every) if result.every and cell.device == "cpu" else None,
        gflops=rate / 1e9,
        tflops=rate / 1e12 if cell.device != "cpu" else None,
        peak_share=rate / run.peak(cell),
        reading_share=result.reading and result.reading / median,
    )
    if result.traffic is not None:
        figures["gbps"] = result.traffic / median / 1e9
        figures["bandwidth_share"] = result.traffic / median / run.bandwidths[cell.threads]
    others = {name: _least_median(run, names, cell.group) for name, names in BASELINES.items()}
    # kernel3 is before kernel4 and its variants kernel4-x
    if kernel := re.fullmatch(r"(kernel|webgpu|backward)(\d+)(-.*)?", cell.contender):
        others["kernel_before"] = _least_median(run, (f"{kernel[1]}{int(kernel[2]) - 1}",), cell.group)
    others["sequential"] = sequential_seconds(cell, run.sequential)
    return named | figures | {f"over_{name}": other and other / median for name, other in others.items()}


def _least_median(run: Run, contenders: tuple[str, ...], group: tuple) -> float | None:
    medians = [r.median for r in run.results if r.cell.contender in contenders and r.cell.group == group]
    return min((median for median in medians if median is not None), default=None)


def plan_text(cells: Sequence[Cell], rounds: int) -> str:
    """The plan of a sweep, one line for each cell."""
    lines = [f"{len(cells)} cells, {rounds} rounds each"]
    return "\n".join(lines + [f"{case(cell)}; {cell.flops / 1e9:.3g} GFLOP" for cell in cells])


def case(cell: Cell) -> str:
    """A cell in one line."""
    unsaid = ("device" if cell.device == "cpu" else "threads", None if cell.backward else "backward")
    names = [name for name in CASE if getattr(cell, name) is not None and name not in unsaid]
    return ", ".join([cell.contender, *(f"{CASE[n]} {case_text(n, getattr(cell, n))}" for n in names)])


def text(run: Run, form: str) -> str:
    """The run as md, csv, json or jsonl, without a final line end."""
    rows = [row(run, result) for result in run.results]
    if form == "json":
        return json.dumps(as_json(run) | {"rows": rows}, indent=1)
    if form == "md":
        return "\n".join([header(run), "", table(rows)])
    facts = {name: run.machine.get(name) for name in MACHINE_COLUMNS}
    if gpu := run.machine.get("gpu"):
        facts["gpu"] = gpu["name"]
    return flat([figures | facts for figures in rows], form)


def flat(rows: list[dict], form: str) -> str:
    """Rows as csv or jsonl, without a final line end."""
    if form == "jsonl":
        return "\n".join(map(json.dumps, rows))
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0] if rows else MACHINE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def header(run: Run) -> str:
    """The machine that the figures were measured on, in Markdown."""
    m = run.machine
    software = f"{m['os']}, Python {m['python']}, PyTorch {m['torch']}"
    when = f"commit {m['commit']}, {m['date']} UTC"
    if gpu := m.get("gpu"):
        limits = [
            f"FMA peak {scaled(run.peaks[1])}FLOP/s in fp32",
            *(
                f"{scaled(peak)}FLOP/s in {dtype} by PyTorch's product of large random matrices"
                for dtype, peak in run.tensor_peaks.items()
            ),
            *(f"memory {name} at {scaled(rate)}B/s" for name, rate in gpu["bandwidths"].items()),
        ]
        if "backend" in gpu:
            what = f"{gpu['kind']}, {gpu['features']}"
            by = f"{gpu['backend']} by wgpu {gpu['wgpu']}"
        else:
            what = f"compute capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
            what += f"{size_text(gpu['memory'])}, L2 {size_text(gpu['l2'])}"
            by = f"CUDA {gpu['cuda']}"
        lines = [f"{gpu['name']}, {what}; host {m['cpu']}", f"{software}, {by}, {when}", ", ".join(limits)]
        lines += map(sequential_text, run.sequential)
    else:
        caches = ", ".join(f"L{cache['level']} {size_text(cache['size'])}" for cache in m["caches"])
        simd = m.get("simd_name", m["simd"])
        lines = [f"{m['cpu']}, {m['cores']} cores, {caches}; {m['isa']}; SIMD: {simd}", f"{software}, {when}"]
        for threads, peak in sorted(run.peaks.items()):
            amx = run.amx_peaks.get(threads)
            lines.append(
                f"{counted(threads, 'thread')}: FMA peak {peak / 1e9:.0f} GFLOP/s, "
                f"{run.bandwidths[threads] / 1e9:.0f} GB/s from beyond {size_text(run.cache)} of cache"
                + (f", AMX peak {amx / 1e9:.0f} GFLOP/s" if amx else "")
            )
    caveats = [] if run.complete else ["Stopped before the end."]
    return "  \n".join(lines + caveats + ([run.busy] if run.busy else []))


def table(rows: list[dict]) -> str:
    """Rows of row() as a Markdown table, with the values that all rows share above it."""
    if not rows:
        return "Nothing was measured."
    shown = [name for name in SHOWN if name == "ms" or any(r[name] is not None for r in rows)]
    if "tflops" in shown:
        shown.remove("gflops")
    lines = []
    for r in rows:
        figures = [figure(name, r[name]) if r["status"] == "ok" or name == "error" else "" for name in shown]
        if r["status"] != "ok":
            figures[0] = f"{r['status']}: {r['note']}"
        lines.append(figures)
    return beside_cells(rows, [SHOWN[name][0] for name in shown], lines)


def beside_cells(rows: Sequence[dict], titles: Sequence[str], figures: Sequence[Sequence[str]]) -> str:
    """A Markdown table of cells, given as dictionaries, and figures; what all cells share stands above it."""
    varying, alike = _case(rows)
    shared = ((name, {r[name] for r in rows if r[name] is not None}) for name in alike)
    same = [f"{CASE[name]} {case_text(name, *values)}" for name, values in shared if values]
    lines = [
        [r["contender"], *(case_text(name, r[name]) for name in varying), *cell_figures]
        for r, cell_figures in zip(rows, figures)
    ]
    table = markdown(["contender", *(CASE[name] for name in varying), *titles], lines)
    return "\n".join([", ".join(same), "", table])


def infirm(run: Run) -> str | None:
    """A sentence on the medians that are not firm, with the least firm ones; None if all are firm."""
    rows = [row(run, result) for result in run.results]
    loose = [r for r in rows if r["margin"] is not None and r["margin"] > FIRM_MARGIN]
    if not loose:
        return None
    loose.sort(key=lambda r: -r["margin"])
    varying, _ = _case(rows)
    names = [
        " ".join([r["contender"], *(f"{CASE[n]}={case_text(n, r[n])}" for n in varying if r[n] is not None)])
        for r in loose[:MAX_NAMED]
    ]
    if len(loose) > MAX_NAMED:
        names.append("...")
    where = f"in {len(loose)} of {len(rows)} cells the median's interval is wider than"
    return f"Not firm: {where} {100 * FIRM_MARGIN:g} % either way ({', '.join(names)})."


def _case(rows: Sequence[dict]) -> tuple[list[str], list[str]]:
    """The names of CASE that differ between rows, and the others. Usual values of some are left out."""
    usual = {
        "queries": lambda r: r["N"],
        "dtype": lambda r: Dtype.FP32,
        "device": lambda r: "cpu",
        "backward": lambda r: False,
        "threads": lambda r: r["threads"] if r["device"] != "cpu" else None,
    }
    names = [n for n in CASE if n not in usual or any(r[n] not in (None, usual[n](r)) for r in rows)]
    varying = [name for name in names if len({r[name] for r in rows if r[name] is not None}) > 1]
    return varying, [name for name in names if name not in varying]


def case_text(name: str, value: object) -> str:
    """A cell's field as a table shows it."""
    if not value and name in ("causal", "backward", "rules"):
        return "forward" if name == "backward" else "none"
    return "" if value is None else name if value is True else str(value)


def figure(name: str, value: float | str | None) -> str:
    """A figure of a row as Markdown shows it; '' for None."""
    if value is None or isinstance(value, str):
        return value or ""
    form = SHOWN[name][1]
    if form == "percent":
        return f"{100 * value:.1f}"
    if form:
        return f"{value:{form}}".replace("%", " %")
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def as_json(run: Run) -> dict:
    """The run as load() reads it."""
    return {"format": FORMAT} | asdict(run)


def save(run: Run, file: Path) -> None:
    """Write a run to a file, which is replaced atomically."""
    result_files.write(as_json(run), file)


def load(file: Path) -> Run:
    """A run that save() wrote. Raises ValueError for any other file."""
    try:
        content = json.loads(file.read_bytes())
        if content["format"] not in READABLE:
            raise ValueError(f"its format is {content['format']!r}, not one of {READABLE}")
        _check_values(content)
        run = Run(**{member.name: content[member.name] for member in fields(Run) if member.name in content})
        for name in ("peaks", "bandwidths", "amx_peaks"):
            setattr(run, name, {int(threads): rate for threads, rate in getattr(run, name).items()})
        run.results = [_result(entry) for entry in content["results"]]
        run.sequential = [_result(entry) for entry in content.get("sequential", [])]
        # Both raise errors for figures that are missing or of another type.
        header(run)
        text(run, "csv")
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} is not a run that bench saved: {reason}") from None
    return run


def _result(entry: dict) -> Result:
    result = Result(**entry | {"cell": Cell(**entry["cell"])})
    result.error_at = result.error_at and tuple(result.error_at)
    values = vars(result) | vars(result.cell)
    one_of: dict[str, Any] = {
        "contender": contenders(),
        "simd": (None, *SIMD),
        "dtype": list(Dtype),
        "device": DEVICES,
        "l2": (None, *L2),
        "causal": (False, True),
        "backward": (False, True),
        "status": ("ok", "wrong", "skipped"),
    }
    forms: dict[str, Any] = {
        **dict.fromkeys(("N", "queries", "d", "batch", "heads", "threads"), int),
        **dict.fromkeys(("br", "bc"), int | None),
        **dict.fromkeys(("note", "rules"), str | None),
        **dict.fromkeys(("error", "scratch", "traffic", "reading"), int | float | None),
    }
    holds = {
        **{name: values[name] in known for name, known in one_of.items()},
        **{name: isinstance(values[name], form) for name, form in forms.items()},
        "paces": len(result.paces) == len(result.seconds) and max(result.paces, default=1) <= 1,
    }
    holds["N"] = holds["N"] and (result.cell.rules is None or result.cell.N <= MAX_RULED_KEYS)
    for name, right in holds.items():
        if not right:
            raise ValueError(f"{name} is {values[name]!r}")
    return result


def _check_values(content: Any) -> None:
    """Refuse a control character in any string, which reports print, and what no machine measures."""
    if isinstance(content, str) and not content.isprintable():
        raise ValueError(f"it holds {ascii(content):.100}; its text must be printable")
    if isinstance(content, int | float) and not content >= 0:
        raise ValueError(f"it holds {content}; its numbers must be at least 0")
    if isinstance(content, dict):
        content = [*content, *content.values()]
    for each in content if isinstance(content, list) else ():
        _check_values(each)
