"""Write the tables of results in README.md and docs/, from the files in benchmarks/results/.

python scripts/make-tables.py

A table stands between `<!-- results: NAME -->` and `<!-- end of results -->`; NAME is one of TABLES.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.cli.terminal import one_line  # noqa: E402
from attention_ext import PARTS  # noqa: E402
from attention_ext.parts import Dtype  # noqa: E402
from lab import saved  # noqa: E402
from lab.bench import report  # noqa: E402

DOCUMENTS = ("README.md", "docs/benchmarking.md", "docs/decoder.md")
MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

README = "amd-zen-5"  # the processor of the README's table
# The case of the README's table of parts.
CASE = {"N": 1024, "queries": 1024, "d": 32, "batch": 1, "heads": 4, "causal": False, "threads": 1}
SIMDS = (None, "auto", "portable")
SDPA = "PyTorch's `scaled_dot_product_attention`"

# The cases of benchmarks/generation.py, as columns name them.
CASES = {
    "batch1": "batch 1, block 256",
    "batch32": "batch 32, block 256",
    "long": "batch 1, block 2048",
    "prefill": "prefill 1,024",
}
# (contender's name in a file, its name in tables); PyTorch's version goes on as it is.
ENGINES = (
    (r"native part4", "native engine, part4"),
    (r"native part4 bf16", "native engine, weights in bf16"),
    (r"native part4 int8", "native engine, weights in int8"),
    (r"native part4 kv-bf16", "native engine, cache in bf16"),
    (r"torch part4", "PyTorch engine, part4"),
    (r"PyTorch ([\d.]+)\S*, no cache", r"nanoGPT's loop, PyTorch \1"),
    (r"PyTorch ([\d.]+)\S*, cached", r"cached PyTorch \1"),
)


@dataclass(frozen=True)
class Results:
    """The contents of a file.

    facts: a sentence on the machine. rows: those of lab.bench.report.row(). cases: figures by case and
    contender, as benchmarks/generation.py saves them.
    """

    facts: str
    rows: Sequence[dict[str, Any]] = ()
    cases: dict[str, dict[str, dict[str, float]]] | None = None


def read_all(kind: str, read: Callable[[Path], Results]) -> dict[str, Results]:
    """The results of a kind by processor, in the order of the files' names. Raises ValueError and OSError."""
    files = sorted(saved.RESULTS.glob(f"{kind}-*.json"))
    if not files:
        raise ValueError(f"{saved.RESULTS} has no {kind}-*.json")
    found = {}
    for file in files:
        try:
            found[file.stem.removeprefix(f"{kind}-")] = read(file)
        except (TypeError, KeyError, AttributeError, RecursionError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file} is not a file of results: {reason}") from None
    return found


def read_bench(file: Path) -> Results:
    """A run that bench saved."""
    content = json.loads(file.read_text())
    run = report.load(file)
    if not run.complete:
        raise ValueError("the run was stopped before its end")
    onnx = {result.cell.group: result.median for result in run.results if result.cell.contender == "onnx"}
    rows = []
    for result in run.results:
        other = onnx.get(result.cell.group)
        ratio = other / result.median if other and result.median else None
        rows.append(report.row(run, result) | {"over_onnx": ratio})
    return Results(described(content), rows=rows)


def read_generation(file: Path) -> Results:
    """The figures that benchmarks/generation.py saved."""
    content = json.loads(file.read_text())
    for case in content["cases"].values():
        for figures in case.values():
            check_figures(figures, ("tokens_per_second", "ms", "relative", "loss"))
            if "relative" in figures and not {"ms", "tokens_per_second"} & figures.keys():
                raise ValueError("relative stands without ms and tokens_per_second")
    return Results(described(content), cases=content["cases"])


def check_figures(figures: dict, names: Sequence[str]) -> None:
    """Raise ValueError unless every figure present is a number."""
    for name in names:
        value = figures.get(name, 0)
        if type(value) not in (int, float) or not 0 <= value < 1e18:
            raise ValueError(f"{name} is {value!r}")


def described(content: dict) -> str:
    """A sentence on the machine."""
    machine = content["machine"]
    known, date = machine.get("microarchitecture"), machine["date"].partition(" ")[0]
    facts = [machine["cpu"], f"PyTorch {machine['torch'].partition('+')[0]}", date]
    facts += ["on a busy machine"] * bool(content.get("busy"))
    if peak := content.get("peaks", {}).get("1"):
        facts.append(f"FMA peak {peak / 1e9:.0f} GFLOP/s")
    if peak := content.get("amx_peaks", {}).get("1"):
        facts.append(f"AMX peak {peak / 1e9:.0f} GFLOP/s")
    return f"{known}: {', '.join(facts)}." if known else f"{', '.join(facts)}."


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head, *lines = [f"| {' | '.join(line)} |" for line in (titles, *rows)]
    return [head, "|---" * len(titles) + "|", *lines]


def parts() -> list[str]:
    """The README's table of parts, on one processor."""
    everything, lines = read_all("bench", read_bench), []
    if README not in everything:
        raise ValueError(f"{saved.RESULTS} has no bench-{README}.json")
    for row in everything[README].rows:
        usual = row["simd"] in SIMDS and row["dtype"] in (None, Dtype.FP32)
        if not usual or any(row[name] != value for name, value in CASE.items()):
            continue
        part, name = PARTS.get(row["contender"]), row["contender"]
        link = f"[{name}](attention_ext/csrc/cpu/{part.operator}.cpp)" if part and part.operator else name
        summary = part.summary if part else SDPA if name == "sdpa" else ""
        threads = "1" if part and not part.threaded else "all"
        scratch = "" if row["scratch"] is None else f"{row['scratch']:,}"
        figures = [three_digits(row[name]) if row[name] else "" for name in ("ms", "over_sdpa")]
        lines.append([link, summary, threads, scratch, *figures])
    return markdown(["part", "algorithm", "threads", "scratch, bytes", "ms", "speed over SDPA"], lines)


def three_digits(value: float) -> str:
    """A figure as in bench's tables."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def bench() -> list[str]:
    """All of `gpt.py bench`'s figures of the parts, a table for each processor."""
    lines = []
    for results in read_all("bench", read_bench).values():
        lines += ["", results.facts, *report.table(list(results.rows)).split("\n")]
    return lines[1:]


def attention() -> list[str]:
    """part4 against SDPA and ONNX Runtime, a table for each processor."""
    lines = []
    for results in read_all("attention", read_bench).values():
        rows = [
            [
                *(str(row["N"]), str(row["d"]), "causal" if row["causal"] else "none"),
                f"{row['ms']:.3g}",
                f"{100 * row['peak_share']:.0f} %" if row["peak_share"] else "",
                *(f"{row[name]:.2f}" if row[name] else "" for name in ("over_sdpa", "over_onnx")),
            ]
            for row in results.rows
            if row["contender"] == "part4" and row["ms"] is not None
        ]
        rows.sort(key=lambda row: (int(row[0]), int(row[1]), row[2] == "causal"))
        titles = ("N", "d", "mask", "part4, ms", "of FMA peak", "over SDPA", "over ONNX Runtime")
        lines += ["", results.facts, "", *markdown(titles, rows)]
    return lines[1:]


def attention_bf16() -> list[str]:
    """part4 against SDPA in bfloat16, a table for each processor."""
    lines = []
    for results in read_all("attention_bf16", read_bench).values():
        rows = [
            [
                *(str(row["N"]), str(row["heads"]), str(row["d"]), "causal" if row["causal"] else "none"),
                *(three_digits(row[name]) for name in ("ms", "gflops")),
                *(f"{row[name]:.2f}" if row[name] else "" for name in ("over_sdpa", "over_part0")),
            ]
            for row in results.rows
            if row["contender"] == "part4" and row["ms"] is not None
        ]
        titles = ("N", "heads", "d", "mask", "part4, ms", "GFLOP/s", "over SDPA", "over part0")
        lines += ["", results.facts, "", *markdown(titles, rows)]
    return lines[1:]


def generation() -> list[str]:
    """All engines in all cases, a table for each processor."""
    lines = []
    for results in read_all("generation", read_generation).values():
        columns = [named(results, case) for case in CASES]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [[name, *(engine_cell(column.get(name)) for column in columns)] for name in names]
        lines += ["", results.facts, "", *markdown(["", *CASES.values()], rows)]
    return lines[1:]


def named(results: Results, case: str) -> dict[str, dict[str, float]]:
    """The figures of a case by the names of tables; the memory limit comes last."""
    figures = {}
    for name, each in ((results.cases or {}).get(case) or {}).items():
        for pattern, title in ENGINES:
            name = re.sub(f"^{pattern}$", title, name)
        figures[name] = each
    if limit := figures.pop("memory limit", None):
        figures["memory limit"] = limit
    return figures


def engine_cell(figures: dict[str, float] | None) -> str:
    """Tokens per second or milliseconds, the time relative to the native engine's, and the loss."""
    if figures is None:
        return ""
    if "relative" not in figures:
        return "wrong"
    rate = f"{figures['ms']:.2f} ms" if "ms" in figures else f"{figures['tokens_per_second']:,.0f}"
    nats = f", {figures['loss']:.4f} nats" if "loss" in figures else ""
    return f"{rate} ({figures['relative']:.2f}){nats}"


TABLES = {each.__name__: each for each in (parts, bench, attention, attention_bf16, generation)}


def document(text: str) -> str:
    """A document with tables made from the files. Raises ValueError and OSError."""

    def table(marked: re.Match) -> str:
        if marked[2] not in TABLES:
            raise ValueError(f"results is {marked[2]!r}; it must be one of {', '.join(TABLES)}")
        return "\n".join([marked[1].rstrip(), *TABLES[marked[2]](), marked[3]])

    return MARKED.sub(table, text)


def main() -> None:
    """Write the documents; an error in a file of results gives one line on stderr and exit code 2."""
    try:
        made = {name: document((ROOT / name).read_text()) for name in DOCUMENTS}
    except (OSError, ValueError) as error:
        print(f"make-tables.py: error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    for name, text in made.items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
