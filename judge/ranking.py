"""Results that `try --save` appends to files, a line of JSON each, and the ranking of a folder of them."""

import hashlib
import json
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from shakespeare import __version__
from shakespeare.judge import report
from shakespeare.judge.speed import Figures, Size
from shakespeare.judge.verdict import Verdict
from shakespeare.lab import result_files
from shakespeare.lab.formats import markdown

Entry = dict[str, Any]
SIZE = {
    "N": float,
    "d": float,
    "heads": float,
    "causal": bool,
    "threads": float,
    "backward": bool,
    "dtype": str,
}
CALL = {"cpu": str, "device": str, **SIZE}  # what two entries must share to be compared
# What a line holds. sha256: the hash of the sources. ms, share: the timed call's, of the peak. library: as in
# Verdict. date: in UTC. version: this project's.
FIELDS = {
    "file": str,
    "sha256": str,
    **CALL,
    "ms": float,
    "share": float,
    "right": bool,
    "library": str,
    "date": str,
    "version": str,
}
HOW = "--save FILE.jsonl keeps this result for a ranking by bench --load"
TITLES = ("rank", "file", "of", "ms", "% of the peak", "times as fast as the best", "date")


def call(entry: Entry) -> tuple[Any, ...]:
    """The values of CALL."""
    return tuple(entry[name] for name in CALL)


def check_file(file: Path) -> None:
    """Raise ValueError unless entries can be appended to this file."""
    if file.suffix != ".jsonl":
        raise ValueError(f"save is {str(file)!r}; it must end with .jsonl")
    result_files.check_file(str(file))
    entries(file)


def keep(file: Path, verdict: Verdict, size: Size, into: Path) -> str:
    """Append a timed kernel's result to a file; return its place among those of the same call, in words."""
    figures = verdict.figures
    assert isinstance(figures, Figures)
    text = b"".join(path.read_bytes() for path in verdict.sources or [file])
    known = vars(size) | vars(figures)
    new: Entry = {
        "file": file.name,
        "sha256": hashlib.sha256(text).hexdigest(),
        **{name: known[name] for name in CALL},
        "ms": figures.ms["own"],
        "share": figures.share,
        "right": True,
        "library": verdict.library,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "version": __version__,
    }
    others = [e["ms"] for e in entries(into) if call(e) == call(new) and not e["library"]]
    # An editor may leave no line end.
    unended = into.exists() and into.read_bytes()[-1:] != b"\n"
    gap = b"\n" if unended else b""
    with into.open("ab", buffering=0) as out:  # one write: others may append too
        out.write(gap + json.dumps(new).encode() + b"\n")
    if verdict.library:
        return f"saved, without a place: {verdict.library}"
    place = 1 + sum(ms <= new["ms"] for ms in others)
    return f"{'the best' if place == 1 else f'number {place}'} of {len(others) + 1} on {figures.cpu}: saved"


def entries(path: Path) -> list[Entry]:
    """The lines of a file, or of all files *.jsonl of a folder, each with `of`: its file's name.

    Raises ValueError, which names the file and the line, for another form.
    """
    found = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else filter(Path.exists, [path]):
        for number, line in enumerate(file.read_text(errors="replace").split("\n"), 1):
            try:
                found += [_checked(json.loads(line)) | {"of": file.stem}] if line else []
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}, line {number}, is not one of try --save: {error}") from None
    return found


def _checked(entry: Any) -> Entry:
    for name, field_type in FIELDS.items():
        if isinstance(entry, dict) and name == "dtype":
            entry = {"dtype": "fp32", **entry}  # earlier files lack it
        if not isinstance(entry, dict) or name not in entry:
            raise ValueError(f"it lacks {name}")
        value = entry[name]
        good = type(value) is field_type or field_type is float and type(value) is int
        if (
            not good
            or field_type is float
            and not 0 < value < 1e18
            or field_type is str
            and not value.isprintable()
        ):
            raise ValueError(f"{name} is {value!r}")
    if not entry["right"]:
        raise ValueError("right is False")
    return {name: entry[name] for name in FIELDS}


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
            place, over = (None, None) if e["library"] else (rank, first / e["ms"])
            rows.append({"rank": place, "over_best": over, **e})
    return rows


def text(rows: list[Entry], form: str) -> str:
    """A ranking as md, csv, json or jsonl, without a final line end."""
    if form == "json":
        return json.dumps({"rows": rows}, indent=1)
    if form != "md":
        from shakespeare.lab.bench.report import flat  # imports torch

        return flat(rows, form)
    tables = []
    for key, group in groupby(rows, call):
        lines = []
        for e in group:
            ms, share, over = (f"{x:.3g}" if x else "" for x in (e["ms"], 100 * e["share"], e["over_best"]))
            lines.append([e["rank"] or e["library"], e["file"], e["of"], ms, share, over, e["date"]])
        cpu, device, *size = key
        title = f"{cpu}: {report.call(device, Size(**dict(zip(SIZE, size))))}"
        tables.append(f"{title}\n\n{markdown(TITLES, lines)}")
    return "\n\n".join(tables) or "Nothing was saved."
