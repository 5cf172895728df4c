"""scripts/make-docs.py: the help of the command line and the tables of benchmarks/results/."""

import json
import runpy
import sys

import pytest
from support import ROOT, bench_run, printed

from shakespeare.app.cli import COMMANDS
from shakespeare.attention_ext import PARTS
from shakespeare.lab import saved
from shakespeare.lab.bench import report

FILE = ROOT / "scripts" / "make-docs.py"
SCRIPT = runpy.run_path(str(FILE))
MACHINE = {"cpu": "Maker 1", "microarchitecture": "Maker One", "torch": "2.13.0", "date": "2026-11-22 08:00"}
GENERATION = {
    "machine": MACHINE,
    "busy": "The machine was busy.",
    "cases": {
        "batch1": {
            "memory limit": {"tokens_per_second": 27186, "relative": 0.7},
            "native part4": {"tokens_per_second": 19033.4, "relative": 1.0, "spread": 0.01},
            "llama.cpp 1": {"error": 0.5, "seconds": []},
            "native part4 int8": {"tokens_per_second": 50000, "relative": 0.38, "loss": 1.26734},
        },
        "prefill": {"native part4": {"ms": 22.5, "relative": 1.0}},
    },
}


def test_the_documents_are_what_the_script_writes():
    """In a process of its own: click keeps the help's option in the form of the first call."""
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['documents']()))"
    documents = json.loads(printed(sys.executable, "-c", code, FILE))
    other = [name for name, text in documents.items() if (ROOT / name).read_text() != text]
    assert other == [], "run: python scripts/make-docs.py"
    results = {str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "results").iterdir()}
    assert documents.keys() == results | {"README.md", "docs/use/cli.md"}


def test_every_command_is_in_the_document():
    headings = [line[3:] for line in (ROOT / "docs/use/cli.md").read_text().splitlines() if line[:3] == "## "]
    assert {*headings} >= set(COMMANDS) - PARTS.keys()


def test_tables_of_results(results):
    run = bench_run(names=("part0", "part4", "sdpa", "onnx"), lengths=(1024,), widths=(32,), threads=(1,))
    for name, change in (("amd-zen-5", {}), ("amd-zen-3", {"cpu": "Maker 0", "microarchitecture": None})):
        run.machine |= MACHINE | change
        for kind in ("bench", "attention"):
            report.save(run, results / f"{kind}-{name}.json")
    saved.write(GENERATION, results / "generation-amd-zen-5.json")
    documents = SCRIPT["results"]()
    assert documents.keys() == {"docs/results/amd-zen-5.md", "docs/results/amd-zen-3.md"}
    assert documents["docs/results/amd-zen-3.md"].startswith("# Maker 0\n")
    text = documents["docs/results/amd-zen-5.md"]
    assert text.startswith("# Maker One\n") and text.count("| contender | ms |") == 2
    assert "| native part4 | 19,033 (1.00) | 22.50 ms (1.00) |\n" in text
    assert "| llama.cpp 1 | wrong |  |\n" in text
    assert "| native part4 int8 | 50,000 (0.38), 1.2673 nats |  |\n" in text
    assert text.endswith("| memory limit | 27,186 (0.70) |  |\n")
    _, table, _ = SCRIPT["readme"]("<!-- results: parts -->\n<!-- end of results -->").split("results")[0:3]
    assert "| Zen 5, AVX-512, ms | over SDPA | Zen 3, AVX2, ms | over SDPA |\n" in table
    (results / "bench-maker-2.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="bench-maker-2.json is not a run that bench saved: its format is"):
        SCRIPT["results"]()


def test_the_speedruns_table(results):
    """The fastest machine comes first; a seed that missed the target and a busy machine are named."""
    for name, seconds, busy in (("slow", 3.0, ["busy"]), ("fast", 1.0, [])):
        runs = [
            {"seconds": seconds * n, "training_seconds": seconds, "characters": 2048, "loss": 1.46 + n / 100}
            for n in (0, 1, 2)
        ]
        about = MACHINE | {"microarchitecture": name, "commit": "1234567"}
        content = {"machine": about, "threads": 2, "options": "--steps 1", "target": 1.4697, "busy": busy}
        saved.write(content | {"runs": runs}, results / f"speedrun-{name}.json")
    head, _, fast, slow, _, best = SCRIPT["speedrun"]().splitlines()
    assert fast.startswith("| fast | 2 | `--steps 1` | 3, 2 did not reach 1.4697 | 1.0 (0.0 to 2.0) | 1.0")
    assert slow.startswith("| slow, busy |") and "| 1.4700 (1.4600 to 1.4800) | 1234567 |" in slow
    assert best == "The best loss of a shipped model: 1.3061 (shakes2048, block size 2048)."
