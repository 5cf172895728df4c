"""The documents' tables of results: scripts/make-docs.py makes them from benchmarks/results/."""

from __future__ import annotations

import copy
import json
import runpy

import pytest
from support import ROOT, bench_run, naming

from shakespeare.lab import saved
from shakespeare.lab.bench import run_file

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-docs.py"))
MACHINE = {
    "cpu": "Maker 1",
    "microarchitecture": "Maker One",
    "torch": "2.13.0+cpu",
    "date": "2026-11-22 08:00",
}
GENERATION = {
    "format": 1,
    "machine": MACHINE,
    "busy": "The machine was busy.",
    "cases": {
        "batch1": {
            "native part4": {"tokens_per_second": 19033.4, "relative": 1.0, "spread": 0.01},
            "PyTorch 2.13.0+cpu, no cache": {"tokens_per_second": 239.2, "relative": 79.512},
            "memory limit": {"tokens_per_second": 27186, "relative": 0.7},
            "CTranslate2 4.8.5": {"tokens_per_second": 10421, "relative": 1.826},
            "llama.cpp 1": {"error": 0.5, "seconds": []},
            "native part4 int8": {"tokens_per_second": 50000, "relative": 0.38, "loss": 1.26734},
            "CTranslate2 4.8.5, int8": {"tokens_per_second": 10422, "relative": 1.826, "loss": 1.268},
        },
        "prefill": {"native part4": {"ms": 22.5, "relative": 1.0}},
    },
}


@pytest.fixture
def made(results):
    """Files of results: runs of bench on the two processors of the README, the engines' figures."""
    run = bench_run(names=("part0", "part4", "sdpa", "onnx"), lengths=(1024,), widths=(32,), threads=(1,))
    for name, change in (("amd-zen-5", {}), ("amd-zen-3", {"cpu": "Maker 0", "microarchitecture": None})):
        run.machine |= MACHINE | change
        for kind in ("bench", "attention", "attention_bf16"):
            run_file.save(run, results / f"{kind}-{name}.json")
    saved.write(GENERATION, results / "generation-amd-zen-5.json")
    return results


def table(name):
    """The lines that the script puts between the marks."""
    first, *lines, last = SCRIPT["document"](f"<!-- results: {name} -->\n<!-- end of results -->").split("\n")
    assert (first, last) == (f"<!-- results: {name} -->", "<!-- end of results -->")
    return lines


@pytest.mark.parametrize("name", SCRIPT["DOCUMENTS"])
def test_the_documents_are_what_the_script_writes(name):
    text = (ROOT / name).read_text()
    assert "<!-- results: " in text
    assert text == SCRIPT["document"](text), "run: python scripts/make-docs.py"


def test_every_table_is_in_a_document():
    text = "".join((ROOT / name).read_text() for name in SCRIPT["DOCUMENTS"])
    assert all(text.count(f"<!-- results: {name} -->\n") == 1 for name in SCRIPT["TABLES"])


def test_a_table_of_bench_for_each_processor(made):
    text = "\n".join(table("bench"))
    assert "Maker 0, PyTorch 2.13.0, 2026-11-22, FMA peak 100 GFLOP/s.\n" in text
    assert "Maker One: Maker 1, PyTorch 2.13.0, 2026-11-22, FMA peak 100 GFLOP/s.\n" in text
    assert text.count("| contender |") == 2


def test_the_readme_has_two_processors(made):
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table("parts")]
    assert rows[0][4:] == ["Zen 5, AVX-512, ms", "over SDPA", "Zen 3, AVX2, ms", "over SDPA"]
    by_part = {row[0].split("]")[0].strip("["): row[4:] for row in rows[2:]}
    assert list(by_part) == ["part0", "part4", "sdpa", "onnx"]
    assert by_part["sdpa"][1::2] == ["1.00", "1.00"] and by_part["part4"][:2] == by_part["part4"][2:]


def test_all_engines(made):
    """All engines, and the memory limit last."""
    lines = table("generation")
    assert lines[0] == "Maker One: Maker 1, PyTorch 2.13.0, 2026-11-22, on a busy machine."
    assert lines[4] == "| native engine, part4 | 19,033 (1.00) |  |  | 22.50 ms (1.00) |"
    assert "| llama.cpp 1 | wrong |  |  |  |" in lines
    assert "| native engine, weights in int8 | 50,000 (0.38), 1.2673 nats |  |  |  |" in lines
    assert "| CTranslate2 4.8.5, int8 | 10,422 (1.83), 1.2680 nats |  |  |  |" in lines
    assert lines[-1] == "| memory limit | 27,186 (0.70) |  |  |  |"


def failure(capsys) -> str:
    """The one line that the script writes when a file of results is wrong; no document is changed."""
    before = [(ROOT / name).read_text() for name in SCRIPT["DOCUMENTS"]]
    with pytest.raises(SystemExit) as stopped:
        SCRIPT["main"]()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("make-docs.py: error: ")
    assert before == [(ROOT / name).read_text() for name in SCRIPT["DOCUMENTS"]]
    return err


def test_a_wrong_file_is_named(made, capsys):
    no_rate = copy.deepcopy(GENERATION)
    no_rate["cases"]["prefill"]["native part4"].pop("ms")
    stopped = bench_run(lengths=(1024,), widths=(32,))
    stopped.complete = False
    run_file.save(stopped, made.parent / "stopped.json")
    for kind, content, reason in (
        ("bench", "[]", "list indices"),
        ("bench", '{"format": 99}', "its format is 99"),
        ("bench", (made.parent / "stopped.json").read_text(), "the run was stopped"),
        ("generation", json.dumps(no_rate), "it lacks 'tokens_per_second'"),
    ):
        file = made / f"{kind}-maker-2.json"
        file.write_text(content)
        with naming(reason):
            said = failure(capsys)
            assert f"{file} is not a" in said and reason in said
        file.unlink()
