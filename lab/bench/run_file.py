"""The file that keeps a run. A file that another program wrote or damaged is refused."""

import json
from dataclasses import fields
from pathlib import Path

from shakespeare.attention_ext import SIMD
from shakespeare.attention_ext.parts import DEVICES, Dtype
from shakespeare.lab import saved
from shakespeare.lab.bench.cell import L2, Cell
from shakespeare.lab.bench.contenders import contenders
from shakespeare.lab.bench.report import header
from shakespeare.lab.bench.results import FORMAT, Result, Run, as_json

READABLE = (2, 3, FORMAT)  # format 2 has no traffic, format 3 no device


def save(run: Run, file: Path) -> None:
    """Write a run to a file, which is replaced atomically."""
    saved.write(as_json(run), file)


def load(file: Path) -> Run:
    """A run that save() wrote. Raises ValueError for any other file."""
    try:
        content = json.loads(file.read_bytes())
        if content["format"] not in READABLE:
            raise ValueError(f"its format is {content['format']!r}, not one of {READABLE}")
        run = Run(**{each.name: content[each.name] for each in fields(Run) if each.name in content})
        for name in ("peaks", "bandwidths", "amx_peaks"):
            setattr(run, name, {int(threads): rate for threads, rate in getattr(run, name).items()})
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
    result.cell, result.error_at = cell, result.error_at and tuple(result.error_at)
    known = {"contender": contenders(), "simd": (None, *SIMD), "dtype": list(Dtype), "device": DEVICES}
    for name, values in (known | {"l2": (None, *L2)}).items():
        _check(name, getattr(cell, name), getattr(cell, name) in values)
    _check("causal", cell.causal, isinstance(cell.causal, bool))
    for name in ("N", "queries", "d", "batch", "heads", "threads", "br", "bc"):
        size = getattr(cell, name)
        absent = size is None and name in ("br", "bc")
        _check(name, size, absent or type(size) is int and _positive(size))
    _check("status", result.status, result.status in ("ok", "wrong", "skipped"))
    _check("note", result.note, isinstance(result.note, str | None))
    for name in ("error", "scratch"):  # may be 0
        _check(name, getattr(result, name), isinstance(getattr(result, name), int | float | None))
    for name in ("traffic", "reading"):
        _check(name, getattr(result, name), getattr(result, name) is None or _positive(getattr(result, name)))
    for name in ("seconds", "every"):
        _check(name, getattr(result, name), _positive(*getattr(result, name)))
    right = _positive(*result.paces) and max(result.paces, default=1) <= 1
    _check("paces", result.paces, right and len(result.paces) == len(result.seconds))
    return result


def _check_run(run: Run) -> None:
    threads = {result.cell.threads for result in run.results}
    for name in ("peaks", "bandwidths", "amx_peaks", "tensor_peaks"):
        _check(name, getattr(run, name), _positive(*getattr(run, name).values()))
    _check("bandwidths", run.bandwidths, threads <= run.peaks.keys() <= run.bandwidths.keys())
    _check("cache", run.cache, run.cache == 0 or _positive(run.cache))
    _check("busy", run.busy, isinstance(run.busy, str | None))
    gpu = run.machine.get("gpu")
    _check("gpu", gpu, gpu is None or isinstance(gpu, dict) and isinstance(gpu.get("name"), str))


def _positive(*values: float) -> bool:
    """Whether all are numbers that a machine can measure."""
    return all(type(value) in (int, float) and 0 < value < 1e18 for value in values)


def _check(name: str, value: object, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}")
