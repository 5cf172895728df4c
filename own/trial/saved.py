"""Results that `try --save` appends to a file, a line of JSON each, and their ranking.

A folder of such files is a leaderboard: each has the name of whom it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from shakespeare import __version__
from shakespeare.lab import saved
from shakespeare.lab.text import markdown
from shakespeare.own.trial import report
from shakespeare.own.trial.speed import Figures, Size
from shakespeare.own.trial.verdict import Verdict

Entry = dict[str, Any]
# What a line holds, by type. sha256: of the file's text. ms, share: of the timed call, and of the peak.
# library: as in Verdict. date: in UTC. version: of this project.
TEXTS = ("file", "sha256", "cpu", "device", "library", "date", "version")
FLAGS, NUMBERS = ("causal", "backward", "right"), ("N", "d", "heads", "threads", "ms", "share")
SIZE = ("N", "d", "heads", "causal", "threads", "backward")
HOW = "--save FILE.jsonl keeps this result for a ranking by bench --load"
TITLES = ("rank", "file", "of", "ms", "% of the peak", "times as fast as the best", "date")


def call(entry: Entry) -> tuple[Any, ...]:
    """What two entries must share to be compared."""
    return entry["cpu"], entry["device"], *(entry[name] for name in SIZE)


def check_file(file: Path) -> None:
    """Raise ValueError unless entries can be appended to this file."""
    if file.suffix != ".jsonl":
        raise ValueError(f"save is {str(file)!r}; it must end with .jsonl")
    saved.check_file(str(file))
    entries(file)


def keep(file: Path, verdict: Verdict, figures: Figures, size: Size, into: Path) -> str:
    """Append the result of a kernel to a file; return its place among those of the same call, in words."""
    new: Entry = {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    new |= {"cpu": figures.cpu, "device": figures.device, **{name: getattr(size, name) for name in SIZE}}
    new |= {"ms": figures.ms["own"], "share": figures.share, "right": True, "library": verdict.library}
    new |= {"date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), "version": __version__}
    others = [e["ms"] for e in entries(into) if call(e) == call(new) and not e["library"]]
    gap = b"\n" * (into.exists() and into.read_bytes()[-1:] != b"\n")  # an editor may leave no line end
    descriptor = os.open(into, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, gap + json.dumps(new).encode() + b"\n")  # one write: others may append too
    finally:
        os.close(descriptor)
    place = 1 + sum(ms <= new["ms"] for ms in others)
    if verdict.library:
        return f"saved, without a place: {verdict.library}"
    return f"{'the best' if place == 1 else f'number {place}'} of {len(others) + 1} on {figures.cpu}: saved"


def entries(path: Path) -> list[Entry]:
    """The lines of a file, or of all files *.jsonl of a folder, each with `of`: its file's name.

    Raises ValueError, which names the file and the line, for another form.
    """
    found = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path] * path.exists():
        for number, line in enumerate(file.read_text(errors="replace").split("\n"), 1):
            try:
                found += [_checked(json.loads(line)) | {"of": file.stem}] if line else []
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}, line {number}, is not one of try --save: {error}") from None
    return found


def _checked(entry: Any) -> Entry:
    for name in (*TEXTS, *FLAGS, *NUMBERS):
        if not isinstance(entry, dict) or name not in entry:
            raise ValueError(f"it lacks {name}")
        value = entry[name]
        if name in TEXTS:
            good = isinstance(value, str) and value.isprintable()
        else:
            good = type(value) is bool if name in FLAGS else type(value) in (int, float) and 0 < value < 1e18
        if not good or name == "right" and not value:
            raise ValueError(f"{name} is {value!r}")
    return {name: entry[name] for name in (*TEXTS, *FLAGS, *NUMBERS)}


def ranking(found: Iterable[Entry]) -> list[Entry]:
    """Entries by call, the fastest first, with `rank` and `over_best`, their speed over the fastest one's.

    Of equal texts in a file the best one counts. Those that call a library are at the end, without a rank.
    """
    rows: list[Entry] = []
    ordered = sorted(found, key=lambda e: (call(e), bool(e["library"]), e["ms"]))
    for _, group in groupby(ordered, call):
        best: dict[Any, Entry] = {}
        for e in group:
            best.setdefault((e["of"], e["sha256"]), e)
        first = next(iter(best.values()))["ms"]
        for rank, e in enumerate(best.values(), 1):
            ranked = (None, None) if e["library"] else (rank, first / e["ms"])
            rows.append(dict(zip(("rank", "over_best"), ranked)) | e)
    return rows


def text(rows: list[Entry], form: str) -> str:
    """A ranking as md, csv, json or jsonl, without a final line end."""
    if form == "json":
        return json.dumps({"rows": rows}, indent=1)
    if form != "md":
        from shakespeare.lab.bench.report import flat  # imports torch

        return flat(rows, form)
    tables = []
    for of, group in groupby(rows, call):
        lines = (
            [e["rank"] or e["library"], e["file"], e["of"], f"{e['ms']:.3g}", f"{100 * e['share']:.3g}"]
            + [f"{e['over_best']:.3g}" if e["rank"] else "", e["date"]]
            for e in group
        )
        title = f"{of[0]}: {report.call(of[1], Size(**dict(zip(SIZE, of[2:]))))}"
        tables.append(f"{title}\n\n{markdown(TITLES, lines)}")
    return "\n\n".join(tables) or "Nothing was saved."
