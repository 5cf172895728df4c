"""The documents' tables of results: scripts/make-tables.py makes them from benchmarks/results/."""

from __future__ import annotations

import copy
import json
import runpy

import pytest
from support import ROOT, bench_run

from lab import saved
from lab.bench import report

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-tables.py"))
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
    """Files of results: runs of bench on the README's processor and another, the engines' figures."""
    run = bench_run(names=("part0", "part4", "sdpa", "onnx"), lengths=(1024,), widths=(32,), threads=(1,))
    for name, change in (("amd-zen-5", {}), ("maker-0", {"cpu": "Maker 0", "microarchitecture": None})):
        run.machine |= MACHINE | change
        for kind in ("bench", "attention", "attention_bf16"):
            report.save(run, results / f"{kind}-{name}.json")
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
    assert text == SCRIPT["document"](text), "run: python scripts/make-tables.py"


def test_every_table_is_in_a_document():
    text = "".join((ROOT / name).read_text() for name in SCRIPT["DOCUMENTS"])
    assert all(text.count(f"<!-- results: {name} -->\n") == 1 for name in SCRIPT["TABLES"])


def test_the_parts(made):
    assert table("parts") == [
        "| part | algorithm | threads | scratch, bytes | ms | speed over SDPA |",
        "|---|---|---|---|---|---|",
        "| part0 | matmul, softmax, matmul in PyTorch | all | 1,000 | 16.1 | 1.00 |",
        "| [part4](attention_ext/csrc/cpu/part4_flash.cpp) | tiles with an online softmax | all | 1,000 "
        "| 16.1 | 1.00 |",
        "| sdpa | PyTorch's `scaled_dot_product_attention` | all | 1,000 | 16.1 | 1.00 |",
        "| onnx |  | all | 1,000 | 16.1 | 1.00 |",
    ]


def test_a_table_of_bench_for_each_processor(made):
    text = "\n".join(table("bench"))
    assert "Maker 0, PyTorch 2.13.0, 2026-11-22, FMA peak 100 GFLOP/s.\n" in text
    assert "Maker One: Maker 1, PyTorch 2.13.0, 2026-11-22, FMA peak 100 GFLOP/s.\n" in text
    assert text.count("| contender |") == 2


def test_part4_against_others(made):
    lines = [line for line in table("attention") if line.startswith("| 1024")]
    assert lines == ["| 1024 | 32 | none | 16.1 | 33 % | 1.00 | 1.00 |"] * 2


def test_all_engines(made):
    """All engines, and the memory limit last."""
    lines = table("generation")
    assert lines[0] == "Maker One: Maker 1, PyTorch 2.13.0, 2026-11-22, on a busy machine."
    assert lines[4] == "| native engine, part4 | 19,033 (1.00) |  |  | 22.50 ms (1.00) |"
    assert "| llama.cpp 1 | wrong |  |  |  |" in lines
    assert "| native engine, weights in int8 | 50,000 (0.38), 1.2673 nats |  |  |  |" in lines
    assert "| CTranslate2 4.8.5, int8 | 10,422 (1.83), 1.2680 nats |  |  |  |" in lines
    assert lines[-1] == "| memory limit | 27,186 (0.70) |  |  |  |"


def damaged(content, change):
    content = copy.deepcopy(content)
    change(content)
    return json.dumps(content)


WRONG = {
    "nothing": ("bench", "", "Expecting value"),
    "a list": ("bench", "[]", "list indices"),
    "no text": ("bench", b"\xff", "can't decode"),
    "no format": ("bench", "{}", "it lacks 'format'"),
    "another format": ("bench", '{"format": 99}', "its format is 99"),
    "no machine": ("generation", damaged(GENERATION, lambda c: c.pop("machine")), "it lacks 'machine'"),
    "a text as figure": (
        "generation",
        damaged(GENERATION, lambda c: c["cases"]["prefill"]["native part4"].update(ms="x\ny")),
        "ms is 'x",
    ),
    "no rate": (
        "generation",
        damaged(GENERATION, lambda c: c["cases"]["prefill"]["native part4"].pop("ms")),
        "relative stands without ms",
    ),
    "no cases": ("generation", damaged(GENERATION, lambda c: c.update(cases=3)), "'int' object"),
}


def failure(capsys) -> str:
    """The one line that the script writes when a file of results is wrong; no document is changed."""
    before = [(ROOT / name).read_text() for name in SCRIPT["DOCUMENTS"]]
    with pytest.raises(SystemExit) as stopped:
        SCRIPT["main"]()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("make-tables.py: error: ")
    assert before == [(ROOT / name).read_text() for name in SCRIPT["DOCUMENTS"]]
    return err


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_named(made, capsys, what):
    kind, content, reason = WRONG[what]
    file = made / f"{kind}-maker-2.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = failure(capsys)
    assert f"{file} is not a" in said and reason in said


def test_a_stopped_run_is_refused(made, capsys):
    run = bench_run(lengths=(1024,), widths=(32,))
    run.complete = False
    report.save(run, made / "bench-maker-2.json")
    assert "bench-maker-2.json is not a file of results: the run was stopped" in failure(capsys)
