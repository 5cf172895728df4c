"""Write what documents copy: docs/cli.md, the help of each command, and the tables of benchmarks/results/.

python scripts/make-docs.py

A table stands between `<!-- results: NAME -->` and `<!-- end of results -->`; NAME is one of TABLES.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shakespeare.app.cli import COMMANDS, cli  # noqa: E402
from shakespeare.app.cli.terminal import one_line  # noqa: E402
from shakespeare.attention_ext import PARTS  # noqa: E402
from shakespeare.attention_ext.parts import Dtype  # noqa: E402
from shakespeare.lab import saved  # noqa: E402
from shakespeare.lab.bench import report, run_file  # noqa: E402
from shakespeare.lab.text import markdown  # noqa: E402

HEAD = """\
# The command line

The help of `gpt.py` and of each command, written by `python scripts/make-docs.py`.

"""
WIDTH = 98  # what click uses of the 100 columns that gpt.py asks for

DOCUMENTS = ("README.md", "docs/benchmarking.md", "docs/decoder.md")
MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

# The processors of the README's table: the first one's scratch is given.
README = {"amd-zen-5": "Zen 5, AVX-512", "amd-zen-3": "Zen 3, AVX2"}
# The case of the README's table of parts.
CASE = {"N": 1024, "queries": 1024, "d": 32, "batch": 1, "heads": 4, "causal": False, "threads": 1}
SIMDS = (None, "auto", "portable")
SDPA = "PyTorch's `scaled_dot_product_attention`"

# The cases of benchmarks.generation, as columns name them.
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


def help_texts() -> str:
    """The text of docs/cli.md."""
    return HEAD + "\n".join([help_text("gpt.py"), *(help_text("gpt.py", name) for name in COMMANDS)])


def help_text(*words: str) -> str:
    """A heading, the command and what it prints on a terminal of 100 columns or more."""
    shown = CliRunner().invoke(cli, [*words[1:], "--help"], prog_name=words[0], terminal_width=WIDTH)
    return f"## {words[-1]}\n\n```text\n$ python {' '.join(words)} --help\n{shown.output}```\n"


def of_each(pattern: str, lines_of: Callable[[Path], list[Any]]) -> list[Any]:
    """The lines of each processor's file, in the order of the files' names.

    Raises OSError, and ValueError naming a file that is wrong.
    """
    files = sorted(saved.RESULTS.glob(pattern))
    if not files:
        raise ValueError(f"{saved.RESULTS} has no {pattern}")
    lines = []
    for file in files:
        try:
            lines += ["", *lines_of(file)]
        except (TypeError, KeyError, AttributeError, RecursionError, ValueError, OverflowError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file} is not a file of results: {reason}") from None
    return lines[1:]


def read_bench(file: Path) -> tuple[str, list[dict[str, Any]]]:
    """(a sentence on the machine, the rows of lab.bench.report.row()) of a run that bench saved."""
    content = json.loads(file.read_text())
    run = run_file.load(file)
    if not run.complete:
        raise ValueError("the run was stopped before its end")
    onnx = {result.cell.group: result.median for result in run.results if result.cell.contender == "onnx"}
    rows = []
    for result in run.results:
        other = onnx.get(result.cell.group)
        over = other / result.median if other and result.median else None
        rows.append(report.row(run, result) | {"over_onnx": over})
    return described(content), rows


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


def parts() -> list[str]:
    """The README's table of parts."""
    lines: dict[str, list[str]] = {}
    titles = ["part", "algorithm", "threads", "scratch, bytes"]
    for slug, title in README.items():
        titles += [f"{title}, ms", "over SDPA"]
        for row in of_each(f"bench-{slug}.json", usual):
            figures = [three_digits(row[name]) if row[name] else "" for name in ("ms", "over_sdpa")]
            name = row["contender"]
            lines.setdefault(name, described_part(name, row["scratch"])).extend(figures)
    return [markdown(titles, lines.values())]


def usual(file: Path) -> list[dict[str, Any]]:
    """The rows of the README's case."""
    return [
        row
        for row in read_bench(file)[1]
        if row["simd"] in SIMDS and row["dtype"] in (None, Dtype.FP32)
        if all(row[name] == value for name, value in CASE.items())
    ]


def described_part(name: str, scratch: int | None) -> list[str]:
    """A contender's cells before its figures."""
    part = PARTS.get(name)
    link = f"[{name}](attention_ext/csrc/cpu/{part.operator}.cpp)" if part and part.operator else name
    summary = part.summary if part else SDPA if name == "sdpa" else ""
    threads = "1" if part and not part.threaded else "all"
    return [link, summary, threads, "" if scratch is None else f"{scratch:,}"]


def three_digits(value: float) -> str:
    """A figure as in bench's tables."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def bench(file: Path) -> list[str]:
    """All of `gpt.py bench`'s figures of the parts."""
    facts, rows = read_bench(file)
    return [facts, report.table(rows)]


def of_part4(titles: Sequence[str], file: Path) -> list[str]:
    """These COLUMNS of part4's results."""
    facts, rows = read_bench(file)
    rows = [row for row in rows if row["contender"] == "part4" and row["ms"] is not None]
    rows.sort(key=lambda row: (row["N"], row["heads"], row["d"], row["causal"]))
    return [facts, "", markdown(titles, ([COLUMNS[title](row) for title in titles] for row in rows))]


def generation(file: Path) -> list[str]:
    """All engines in all cases, as benchmarks.generation saved them."""
    content = json.loads(file.read_text())
    columns = [content["cases"].get(case, {}) for case in CASES]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[titled(name), *(figures_of(column.get(name)) for column in columns)] for name in names]
    rows.sort(key=lambda row: row[0] == "memory limit")  # it comes last
    return [described(content), "", markdown(["", *CASES.values()], rows)]


def titled(name: str) -> str:
    """The name of an engine in tables."""
    for pattern, title in ENGINES:
        name = re.sub(f"^{pattern}$", title, name)
    return name


def figures_of(figures: dict[str, float] | None) -> str:
    """Tokens per second or milliseconds, the time relative to the native engine's, and the loss."""
    if figures is None:
        return ""
    if "relative" not in figures:
        return "wrong"
    rate = f"{figures['ms']:.2f} ms" if "ms" in figures else f"{figures['tokens_per_second']:,.0f}"
    nats = f", {figures['loss']:.4f} nats" if "loss" in figures else ""
    return f"{rate} ({figures['relative']:.2f}){nats}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "N": lambda row: str(row["N"]),
    "heads": lambda row: str(row["heads"]),
    "d": lambda row: str(row["d"]),
    "mask": lambda row: "causal" if row["causal"] else "none",
    "part4, ms": lambda row: three_digits(row["ms"]),
    "GFLOP/s": lambda row: three_digits(row["gflops"]),
    "of FMA peak": lambda row: f"{100 * row['peak_share']:.0f} %" if row["peak_share"] else "",
    "over SDPA": lambda row: f"{row['over_sdpa']:.2f}" if row["over_sdpa"] else "",
    "over part0": lambda row: f"{row['over_part0']:.2f}" if row["over_part0"] else "",
    "over ONNX Runtime": lambda row: f"{row['over_onnx']:.2f}" if row["over_onnx"] else "",
}
OF_FP32 = ("N", "d", "mask", "part4, ms", "of FMA peak", "over SDPA", "over ONNX Runtime")
OF_BF16 = ("N", "heads", "d", "mask", "part4, ms", "GFLOP/s", "over SDPA", "over part0")
TABLES: dict[str, Callable[[], list[str]]] = {
    "parts": parts,
    "bench": partial(of_each, "bench-*.json", bench),
    "attention": partial(of_each, "attention-*.json", partial(of_part4, OF_FP32)),
    "attention_bf16": partial(of_each, "attention_bf16-*.json", partial(of_part4, OF_BF16)),
    "generation": partial(of_each, "generation-*.json", generation),
}


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
        print(f"make-docs.py: error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    for name, text in (*made.items(), ("docs/cli.md", help_texts())):
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
