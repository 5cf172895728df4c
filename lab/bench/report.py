"""The forms of a run: Markdown, CSV, JSON, JSON lines, and a file that load() reads again."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, fields
from pathlib import Path

from attention_ext import SIMD
from attention_ext.parts import DEVICES, Dtype
from lab import saved
from lab.bench import sequential
from lab.bench.cases import L2, SDPA_BACKENDS, Cell, kernel_before
from lab.bench.contenders import contenders
from lab.bench.results import FIRM_MARGIN, Result, Run
from lab.text import size_text
from lab.timing import interval, quartiles

FORMAT = 4  # the file's format
READABLE = (2, 3, 4)  # format 2 has no traffic, format 3 no device
FORMATS = ("md", "csv", "json", "jsonl")
MOST_NAMED = 3  # cells that infirm() names
# The baselines of "over ..." columns; the fastest one counts.
BASELINES: dict[str, tuple[str, ...]] = {"part0": ("part0",), "sdpa": ("sdpa", *SDPA_BACKENDS)}
# Repeated in each row of CSV and JSON lines.
MACHINE_COLUMNS = ("cpu", "isa", "simd_name", "torch", "commit", "date")

# Columns that identify a cell. In Markdown the columns that are the same in all rows stand above the table.
CASE = {
    "simd": "SIMD",
    "N": "N",
    "queries": "queries",
    "d": "d",
    "batch": "batch",
    "heads": "heads",
    "causal": "mask",
    "dtype": "dtype",
    "br": "Br",
    "bc": "Bc",
    "threads": "threads",
    "device": "device",
    "l2": "L2",
}
ROW_FIGURES = (
    "ms",
    "iqr_ms",
    "low_ms",
    "high_ms",
    "margin",
    "left_out",
    "gflops",
    "tflops",
    "gbps",
    "peak_share",
    "bandwidth_share",
    "reading_share",
    *(f"over_{name}" for name in BASELINES),
    "over_kernel_before",
    "over_sequential",
)
# Columns of the Markdown table.
FIGURES = {
    "ms": "ms",
    "iqr_ms": "IQR, ms",
    "margin": "± %",
    "left_out": "left out",
    "gflops": "GFLOP/s",
    "tflops": "TFLOP/s",
    "peak_share": "of peak",
    "gbps": "GB/s",
    "bandwidth_share": "of bandwidth",
    "reading_share": "of reading",
    "scratch": "scratch",
    "over_part0": "over part0",
    "over_sdpa": "over SDPA",
    "over_kernel_before": "over kernel before",
    "over_sequential": "over C++",
    "error": "error",
}


def row(run: Run, result: Result) -> dict:
    """A result as a flat row of figures; None for missing ones.

    ms, iqr_ms: median and interquartile range. low_ms, high_ms: the median's interval(); margin: half its
    width, as a share of the median. left_out: rounds that were slowed and do not count. gbps: 10^9 bytes
    per second into the last of a core's own caches, by the part's own count; on a GPU those of q, k, v and
    the output, if moving them once takes longer than the arithmetic. reading_share: the time of a launch that
    only reads as many bytes, over the call's. over_part0, over_sdpa: the speed over that contender in the
    same group; of SDPA's backends the fastest counts. over_kernel_before: the speed over the kernel with the
    number before. over_sequential: that over part1 on one core, by lab.bench.sequential.
    """
    cell, median = result.cell, result.median
    named = asdict(cell) | {"status": result.status, "note": result.note, "error": result.error}
    figures: dict[str, float | None] = dict.fromkeys(ROW_FIGURES)
    if median is not None:
        first, third = quartiles(result.counted)
        low, high = interval(result.counted)
        figures |= {"ms": 1e3 * median, "iqr_ms": 1e3 * (third - first)}
        figures |= {"low_ms": 1e3 * low, "high_ms": 1e3 * high, "margin": result.margin}
        figures["left_out"] = len(result.seconds) - len(result.counted)
        figures["gflops"] = cell.flops / median / 1e9
        figures["tflops"] = cell.flops / median / 1e12 if cell.device == "cuda" else None
        figures["peak_share"] = cell.flops / median / run.peak(cell)
        if result.traffic is not None:
            figures["gbps"] = result.traffic / median / 1e9
            figures["bandwidth_share"] = result.traffic / median / run.bandwidths[cell.threads]
        if result.reading is not None:
            figures["reading_share"] = result.reading / median
        others = {name: _least_median(run, names, cell.group) for name, names in BASELINES.items()}
        others["kernel_before"] = _least_median(run, (kernel_before(cell.contender),), cell.group)
        others["sequential"] = sequential.seconds(cell, run.sequential)
        for name, other in others.items():
            figures[f"over_{name}"] = None if other is None else other / median
    return named | figures | {"scratch": result.scratch}


def _least_median(run: Run, contenders: tuple[str | None, ...], group: tuple) -> float | None:
    medians = [r.median for r in run.results if r.cell.contender in contenders and r.cell.group == group]
    return min((median for median in medians if median is not None), default=None)


def text(run: Run, form: str) -> str:
    """The run in one of FORMATS, without a final line end."""
    rows = [row(run, result) for result in run.results]
    if form == "json":
        return json.dumps(as_json(run) | {"rows": rows}, indent=1)
    facts = {name: run.machine.get(name) for name in MACHINE_COLUMNS}
    if gpu := run.machine.get("gpu"):
        facts["gpu"] = gpu["name"]
    if form == "jsonl":
        return "\n".join(json.dumps(figures | facts) for figures in rows)
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, [*(rows[0] if rows else ()), *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows(figures | facts for figures in rows)
        return out.getvalue().rstrip("\n")
    return "\n".join([header(run), "", table(rows)])


def header(run: Run) -> str:
    """The machine that the figures were measured on, in Markdown."""
    m = run.machine
    if m.get("gpu"):
        return "  \n".join(_header_of_gpu(run))
    caches = ", ".join(f"L{cache['level']} {size_text(cache['size'])}" for cache in m["caches"])
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {caches}; {m['isa']}; SIMD: {m.get('simd_name', m['simd'])}",
        f"{m['os']}, Python {m['python']}, PyTorch {m['torch']}, commit {m['commit']}, {m['date']} UTC",
    ]
    for threads, peak in sorted(run.peaks.items()):
        lines.append(
            f"{threads} thread{'s' * (threads > 1)}: FMA peak {peak / 1e9:.0f} GFLOP/s, "
            f"{run.bandwidths[threads] / 1e9:.0f} GB/s from beyond {size_text(run.cache)} of cache"
            + (f", AMX peak {run.amx_peaks[threads] / 1e9:.0f} GFLOP/s" if threads in run.amx_peaks else "")
        )
    return "  \n".join(lines + _caveats(run))


def _header_of_gpu(run: Run) -> list[str]:
    m, gpu = run.machine, run.machine["gpu"]
    limits = [f"FMA peak {_tera(run.peaks[1])}FLOP/s in fp32"]
    limits += [
        f"{_tera(peak)}FLOP/s in {dtype} by PyTorch's product of large random matrices"
        for dtype, peak in run.tensor_peaks.items()
    ]
    limits += [f"memory {name} at {_tera(rate)}B/s" for name, rate in gpu["bandwidths"].items()]
    lines = [
        f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
        f"{size_text(gpu['memory'])}, L2 {size_text(gpu['l2'])}; host {m['cpu']}",
        f"{m['os']}, Python {m['python']}, PyTorch {m['torch']}, CUDA {gpu['cuda']}, commit {m['commit']}, "
        f"{m['date']} UTC",
        ", ".join(limits),
        *(sequential.text(result) for result in run.sequential),
    ]
    return lines + _caveats(run)


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g} T" if rate >= 1e12 else f"{rate / 1e9:.3g} G"


def _caveats(run: Run) -> list[str]:
    stopped = ["Stopped before the end."] * (not run.complete)
    return stopped + [run.busy] * bool(run.busy)  # type: ignore[list-item]


def table(rows: list[dict]) -> str:
    """Rows of row() as a Markdown table, with the values that all rows share above it."""
    if not rows:
        return "Nothing was measured."
    varying, alike = _case(rows)
    same = [
        f"{CASE[name]} {case_text(name, values.pop())}"
        for name in alike
        if (values := {r[name] for r in rows if r[name] is not None})
    ]
    shown = [name for name in FIGURES if name == "ms" or any(r[name] is not None for r in rows)]
    unwanted = {"left_out"} if not any(r["left_out"] for r in rows) else set()
    unwanted |= {"gflops"} if "tflops" in shown else set()
    shown = [name for name in shown if name not in unwanted]
    titles = ["contender", *(CASE[name] for name in varying), *(FIGURES[name] for name in shown)]
    lines = [", ".join(same), "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for r in rows:
        cells = [r["contender"], *(case_text(name, r[name]) for name in varying)]
        if r["status"] == "ok":
            cells += [_figure(name, r[name]) for name in shown]
        else:
            figures = [_figure(name, r[name]) if name == "error" else "" for name in shown]
            cells += [f"{r['status']}: {r['note']}", *figures[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
        for r in loose[:MOST_NAMED]
    ]
    more = ["..."] * (len(loose) > MOST_NAMED)
    return (
        f"Not firm: in {len(loose)} of {len(rows)} cells the median's interval is wider than "
        f"{100 * FIRM_MARGIN:g} % either way ({', '.join(names + more)})."
    )


def _case(rows: list[dict]) -> tuple[list[str], list[str]]:
    """The names of CASE that differ between rows, and the others. Usual values of some are left out."""
    usual = {
        "queries": lambda r: r["N"],
        "dtype": lambda r: Dtype.FP32,
        "device": lambda r: "cpu",
        "threads": lambda r: r["threads"] if r["device"] == "cuda" else None,
    }
    case = [
        name for name in CASE if name not in usual or any(r[name] not in (None, usual[name](r)) for r in rows)
    ]
    varying = [name for name in case if len({r[name] for r in rows if r[name] is not None}) > 1]
    return varying, [name for name in case if name not in varying]


def case_text(name: str, value) -> str:
    """A cell's field as a table shows it."""
    if name == "causal":
        return "causal" if value else "none"
    return "" if value is None else str(value)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name in ("peak_share", "bandwidth_share", "reading_share"):
        return f"{100 * value:.0f} %"
    if name == "margin":
        return f"{100 * value:.1f}"
    if name in ("scratch", "left_out"):
        return f"{value:,}"
    if name == "error":
        return f"{value:.0e}"
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def as_json(run: Run) -> dict:
    """The run in the format of load()."""
    return {"format": FORMAT} | asdict(run)


def save(run: Run, file: Path) -> None:
    """Write a run to a file, which is replaced atomically."""
    saved.write(as_json(run), file)


def load(file: Path) -> Run:
    """A run that save() wrote. Raises ValueError for any other file."""
    try:
        content = json.loads(file.read_text())
        if content["format"] not in READABLE:
            raise ValueError(f"its format is {content['format']!r}, not one of {READABLE}")
        known = {f.name for f in fields(Run)}
        run = Run(**{name: value for name, value in content.items() if name in known})
        run.peaks = {int(threads): peak for threads, peak in run.peaks.items()}
        run.bandwidths = {int(threads): rate for threads, rate in run.bandwidths.items()}
        run.amx_peaks = {int(threads): peak for threads, peak in run.amx_peaks.items()}
        run.results = [_result(entry) for entry in content["results"]]
        run.sequential = [_result(entry) for entry in content.get("sequential", [])]
        _check_run(run)
        header(run)  # raises KeyError for missing facts of the machine
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} is not a run that bench saved: {reason}") from None
    return run


def _result(entry: dict) -> Result:
    cell, result = Cell(**entry["cell"]), Result(**entry)
    result.cell = cell
    _check("contender", cell.contender, cell.contender in contenders())
    _check("simd", cell.simd, cell.simd is None or cell.simd in SIMD)
    _check("causal", cell.causal, isinstance(cell.causal, bool))
    _check("dtype", cell.dtype, cell.dtype in list(Dtype))
    _check("device", cell.device, cell.device in DEVICES)
    _check("l2", cell.l2, cell.l2 in (None, *L2))
    for name in ("N", "queries", "d", "batch", "heads", "br", "bc", "threads"):
        size = getattr(cell, name)
        _check(name, size, size is None and name in ("br", "bc") or type(size) is int and 0 < size < 2**31)
    _check("status", result.status, result.status in ("ok", "wrong", "skipped"))
    _check("note", result.note, isinstance(result.note, str | None))
    _check("error", result.error, result.error is None or _is_number(result.error))
    _check("scratch", result.scratch, result.scratch is None or type(result.scratch) is int)
    _check("seconds", result.seconds, all(_is_number(s) and s > 0 for s in result.seconds))
    _check("paces", result.paces, all(_is_number(pace) and 0 < pace <= 1 for pace in result.paces))
    _check("paces", result.paces, len(result.paces) == len(result.seconds))
    for name in ("traffic", "reading"):
        figure = getattr(result, name)
        _check(name, figure, figure is None or _is_number(figure) and figure > 0)
    result.error_at = None if result.error_at is None else tuple(result.error_at)
    return result


def _check_run(run: Run) -> None:
    threads = {result.cell.threads for result in run.results}
    for name in ("peaks", "bandwidths"):
        rates = getattr(run, name)
        _check(name, rates, all(_is_number(rate) and rate > 0 for rate in rates.values()))
        _check(name, rates, threads <= rates.keys() and run.peaks.keys() <= rates.keys())
    for name in ("amx_peaks", "tensor_peaks"):
        rates = getattr(run, name)
        _check(name, rates, all(_is_number(rate) and rate > 0 for rate in rates.values()))
    _check("cache", run.cache, type(run.cache) is int and run.cache > 0)
    _check("busy", run.busy, isinstance(run.busy, str | None))
    gpu = run.machine.get("gpu")
    _check("gpu", gpu, gpu is None or isinstance(gpu, dict) and isinstance(gpu.get("name"), str))


def _check(name: str, value, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}")


def _is_number(value) -> bool:
    return type(value) in (int, float) and -1e18 < value < 1e18  # no machine measures more
