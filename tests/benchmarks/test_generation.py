"""The text benchmark: verification, contenders that are left out, and figures."""

from __future__ import annotations

import json
import statistics
from multiprocessing import get_context

import pytest
import torch
from click import ClickException
from click.testing import CliRunner
from support import FakeGpu

from benchmarks import generation as bench
from benchmarks import measuring, on_gpu
from shakespeare.attention_ext import processor
from shakespeare.attention_ext.parts import BuildError
from shakespeare.attention_ext.webgpu.gpu import Adapter, opened

CASES = {
    "short": bench.Case("shakes128", 1, 1, 4),
    "pair": bench.Case("shakes128", 2, 1, 4),
    "read": bench.Case("shakes128", 1, 8, 1),
}


class Fake(bench.Own):
    """This project's engine under another name, with an error in its logits and with changed tokens."""

    def __init__(self, name, off=0.0, change=lambda texts: texts):
        self.made, self.off, self.change = name, off, change

    def __call__(self, model, threads):
        super().__init__(model, bench.Contender("torch", "part0"), 8)
        self.name = self.made
        return self

    def logits(self, ids):
        logits = super().logits(ids).clone()
        logits[0] += self.off
        return logits

    def greedy_batch(self, prompts, count):
        return self.change(super().greedy_batch(prompts, count))


@pytest.fixture
def run(monkeypatch, quiet, tmp_path):
    """Run small cases with other engines, as on a quiet, steady machine; return exit code and output."""
    quiet(bench)
    monkeypatch.setattr(bench, "read_bandwidth", lambda size: 1e11)
    for name, case in CASES.items():
        monkeypatch.setitem(bench.CASES, name, case)
    monkeypatch.setattr(bench, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(bench.corpus, "INPUT", tmp_path / "none.txt")

    def run(*arguments, **others):
        for name, other in others.items():
            monkeypatch.setitem(bench.PEERS, name, other)
        common = ["--rounds", "2", "--engines", "torch", "--peers", ",".join(others)]
        done = CliRunner().invoke(bench.main, [*common, *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    return run


def rows(output):
    """The table's rows: the first cell gives the others."""
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}


def test_the_figures_follow_from_the_times(capsys):
    case = bench.Case("shakes128", 1, 1, 100)
    seconds = {"ours": [0.1, 0.1, 0.1], "other": [0.3, 0.2, 0.1]}
    right = {"error": 2e-6, "agreement": "100 of 100"}
    figures = {name: right | {"seconds": times} for name, times in seconds.items()}
    figures["other"]["loss"] = 1.23456
    bench.show(case, figures | {bench.MEMORY_LIMIT: {"seconds": [0.05]}})
    table = rows(capsys.readouterr().out)
    assert table["ours"] == ["1000", "0 %", "", "", "50 %", "1.00", "2e-06", "", "100 of 100"]
    assert table["other"] == ["500", "100 %", "", "", "25 %", "2.00", "2e-06", "1.2346", "100 of 100"]
    assert table["memory limit"] == ["2000", "", "", "", "100 %", "0.50", "", "", ""]
    assert table["contender"][5] == "ours = 1"
    for batch, prompt, count, unit, figure in ((4, 1, 100, "tokens/s", "4000"), (1, 64, 1, "ms", "100.00")):
        case = bench.Case("shakes128", batch, prompt, count)
        bench.show(case, {"ours": {"error": 0.0, "agreement": "", "seconds": [0.1, 0.1]}})
        table = rows(capsys.readouterr().out)
        assert table["ours"] == [figure, "0 %", "", "", "", "1.00", "0e+00", "", ""]
        assert table["contender"][0] == unit and "memory limit" not in table


@pytest.mark.full
def test_the_native_engine_writes_the_same(run):
    code, output = run("--cases", "pair", "--engines", "native,cuda", "--parts", "part0,part4")
    assert code == 0
    table = rows(output)
    ours = ["native part4", "native part4 bf16", "native part4 int8", "native part4 kv-bf16"]
    assert list(table) == ["contender", *ours]  # part0 has no native engine, the CPU no cuda engine
    errors = [float(table[name][6]) for name in ours]
    assert errors[0] < 1e-4 < errors[1] < errors[2] < 0.5  # the rounding is visible
    assert 1e-4 < errors[3] < 0.1
    assert table["native part4"][-1] == "4 of 4" and float(table["native part4"][6]) < 1e-4


def test_what_is_wrong_is_not_timed(run):
    def fail(texts):
        raise AssertionError("a wrong one was timed")

    wrong = {"A": Fake("wrong", 0.005, fail), "B": Fake("NaN", float("nan"), fail)}
    code, output = run("--cases", "short", **wrong)
    assert code == bench.WRONG_EXIT_CODE
    table = rows(output)
    assert table["wrong"] == ["wrong, so not timed", "", "", "", "", "", "5e-03", "", ""]
    assert table["NaN"][0] == "wrong, so not timed"
    assert float(table["torch part4"][3]) == 1


class Failing(Fake):
    """A contender that fails at its call with this number, of all from 0 on, its set-up included."""

    def __init__(self, at, error):
        super().__init__(f"fails at {at}")
        self.left, self.error = at, error

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def __call__(self, *arguments):
        self._count()
        return super().__call__(*arguments[:2])

    def logits(self, ids):
        self._count()
        return super().logits(ids)

    def greedy_batch(self, prompts, count):
        self._count()
        return super().greedy_batch(prompts, count)


def test_a_contender_that_fails_is_a_row(run):
    """At its set-up, its check, its first text, and while it is timed."""
    missing = ModuleNotFoundError("No module named 'nowhere.x'", name="nowhere")
    errors = [
        missing,
        RuntimeError("a | b\nsecond\n\nthird"),
        AssertionError(),
        torch.OutOfMemoryError("full"),
    ]
    failing = {f"P{at}": Failing(at, error) for at, error in enumerate(errors)}
    code, output = run("--cases", "short", **failing)
    assert code == 0, output
    table = rows(output)
    reasons = ["nowhere is not installed", "failed: a / b second", "failed: AssertionError", "failed: full"]
    for at, reason in enumerate(reasons):
        assert table["P0" if at == 0 else f"fails at {at}"] == [reason]
    assert float(table["torch part4"][5]) == 1
    assert run("--cases", "short", A=Failing(0, missing), B=Fake("wrong", 0.005))[0] == bench.WRONG_EXIT_CODE


def test_what_fails_in_other_benchmarks_is_a_row(capsys):
    def row(case):
        return f"{case} | {1 / case:g}"

    def raises(error=ValueError("no")):
        raise error

    failed = {}
    samples = measuring.take_turns({"right": lambda: 2.0, ("wrong", 1): raises}, 3, failed)
    assert list(samples) == ["right"] and samples["right"].seconds == [2.0] * 3
    late = (made for made in measuring.rows(((2,), (0,), (4,)), row) if failed.setdefault("late", "too"))
    measuring.show_table("case | figure", late, failed)
    table = rows(capsys.readouterr().out)
    assert table == {
        "case": ["figure"], "2": ["0.5"], "0": ["failed: division by zero"], "4": ["0.25"],
        "wrong": ["1", "failed: no"], "late": ["too"],
    }  # fmt: skip
    with pytest.raises(ClickException, match="wrong result"):
        measuring.attempt({}, "", raises, ClickException("wrong result"))


def test_save_alone_keeps_the_figures_by_processor(run, results, monkeypatch):
    monkeypatch.setattr(bench.Load, "others", staticmethod(lambda: 0.7))
    assert run("--cases", "short,read", "--save", Other=Fake("wrong", 0.005))[0] == 3
    (file,) = results.iterdir()
    assert file.name == f"generation-{processor.slug()}.json"
    kept = json.loads(file.read_text())
    assert (kept["format"], kept["rounds"], kept["machine"]["cpu"]) == (1, 2, processor.name())
    assert kept["busy"].startswith("The machine was busy: others took 0.70 processors")
    ours, limit = (kept["cases"]["short"][name] for name in ("torch part4", "memory limit"))
    assert ours["tokens_per_second"] == pytest.approx(4 / statistics.median(ours["seconds"]))
    assert ours["relative"] == 1 and ours["spread"] >= 0 and limit["relative"] > 0
    assert "relative" not in kept["cases"]["short"]["wrong"]
    assert kept["cases"]["read"]["torch part4"]["ms"] > 0 and "memory limit" not in kept["cases"]["read"]


def test_wrong_arguments(run):
    for option in ("--cases", "--engines", "--parts", "--peers", "--weights"):
        code, output = run(option, "x")
        assert code == 2 and "'x' must be one of" in output, option
    code, output = run("--rounds", "1")
    assert code == 2 and "--rounds" in output


@pytest.mark.full
def test_a_contender_in_a_process_of_its_own(extension, threads):
    ids = [3, 1, 4, 1, 5]
    contender = bench.Contender("torch", "part4")
    with bench.OwnProcess(ctx=get_context("spawn")) as process:
        apart = process.open(contender, "batch1", 2)
        apart.open()
        name, (seconds, text), (_, logits) = (
            apart.get("name"),
            apart.call("greedy_batch", [ids], 6),
            apart.call("logits", ids),
        )
        lacking = process.open(bench.Contender("nowhere"), "batch1", 2)
        failed = {}
        assert bench.open_all({"nowhere": lacking}, failed) == [] and failed == {
            "nowhere": "failed: 'nowhere'"
        }
    here = bench.Opened(contender, "batch1", 1)
    here.open()
    assert name == "torch part4" and seconds > 0 and text == here.call("greedy_batch", [ids], 6)[1]
    torch.testing.assert_close(torch.tensor(logits), torch.tensor(here.call("logits", ids)[1]))


def has_adapter():
    try:
        return bool(opened())
    except BuildError:
        return False


def test_a_gpus_contenders(monkeypatch, capsys):
    """Without a GPU: the steps that would be captured run one by one, and the limits are made up."""
    monkeypatch.setattr(on_gpu, "Gpu", FakeGpu)
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(on_gpu.GraphPyTorch, "captured", lambda self, run: run)
    monkeypatch.setattr(bench, "LEAST_SECONDS", 0.0)
    for name, case in CASES.items():
        monkeypatch.setitem(bench.CASES, name, case)
    monkeypatch.setitem(on_gpu.PEERS, "Failing", Failing(0, ValueError("no")))
    peers, engines = ("CachedPyTorch", "GraphPyTorch", "Failing"), ("native", "torch", "webgpu")
    if has_adapter():
        monkeypatch.setattr(Adapter, "is_cpu", False)
    content = on_gpu.compare(("pair", "read"), engines, ("fp32", "bf16"), peers, 2)
    out = capsys.readouterr().out
    assert (
        "webgpu part4 | failed: " in out
    ) != has_adapter() and "| Failing bf16 kv-bf16 | failed: no |" in out
    assert "Fake GPU" in out and "a step moves" in out
    for title, figures in content["cases"].items():
        assert len(figures) == 4 + ("fp32" in title) and "wrong" not in out, out
        if title == "pair fp32":
            assert {each["agreement"] for each in figures.values() if "agreement" in each} == {"4 of 4"}
