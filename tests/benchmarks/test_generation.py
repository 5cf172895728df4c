"""The text benchmark: verification, contenders that are left out, and figures."""

from __future__ import annotations

import json
import statistics
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from support import FakeGpu, table

from benchmarks import generation as bench
from benchmarks.peers import ours
from benchmarks.peers.graphs import GraphPyTorch
from shakespeare.attention_ext import processor
from shakespeare.attention_ext.parts import BuildError
from shakespeare.lab import machine

SIZES = {"short": (1, 1, 4), "pair": (2, 1, 4), "read": (1, 8, 1)}
CASES = {name: bench.Case("shakes128", *sizes) for name, sizes in SIZES.items()}


def fake(name, off=0.0, **methods):
    """Opens this project's engine under another name, with an error in its logits and with other methods."""

    def opened(model, *arguments):
        peer = ours.Own(model, "torch", 8)
        peer.name = name
        right = peer.logits
        peer.logits = lambda ids: right(ids) + torch.full((65,), off)
        for method, other in methods.items():
            setattr(peer, method, other)
        return peer

    return opened


@pytest.fixture(autouse=True)
def small(monkeypatch, quiet, tmp_path):
    """Small cases, as on a quiet, steady machine."""
    quiet(machine)
    monkeypatch.setattr(machine, "read_bandwidth", lambda size: 1e11)
    for name, case in CASES.items():
        monkeypatch.setitem(bench.CASES, name, case)
    monkeypatch.setattr(bench, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(bench.corpus, "INPUT", tmp_path / "none.txt")


@pytest.fixture
def run(monkeypatch):
    """Run cases with other engines; return exit code and output."""

    def run(*arguments, **others):
        monkeypatch.setitem(bench.PEERS, "cpu", others)
        done = CliRunner().invoke(bench.main, ["--rounds", "2", "--engines", "torch", *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    return run


def rows(output):
    """The table's rows: the first cell gives the others."""
    return {first: others for first, *others in table(output)}


def test_the_figures_follow_from_the_times(capsys):
    right = {"error": 2e-6, "agreement": "100 of 100", "paces": [1.0] * 3}
    figures = {"ours": right | {"seconds": [0.1] * 3}, "other": right | {"seconds": [0.3, 0.2, 0.1]}}
    figures["other"]["loss"] = 1.23456
    case = bench.Case("shakes128", 1, 1, 100)
    bench.show(case, bench.finished(case, figures, 0.05))
    table = rows(capsys.readouterr().out)
    assert table["ours"] == ["1000", "0 %", "3 of 3", "1.00", "50 %", "1.00", "2e-06", "", "100 of 100"]
    assert table["other"] == "500|50 %|3 of 3|1.00|25 %|2.00|2e-06|1.2346|100 of 100".split("|")
    assert table["memory limit"] == ["2000", "", "", "", "100 %", "0.50", "", "", ""]
    assert table["contender"][5] == "ours = 1"


def test_what_is_wrong_is_not_timed_and_what_fails_is_a_row(run):
    """Failures at the set-up, the check, the first text, and while it is timed."""
    timed = Mock(side_effect=AssertionError("a wrong one was timed"))
    missing = Mock(side_effect=ModuleNotFoundError("No module named 'nowhere.x'", name="nowhere"))
    failing = {
        "P0": missing,
        "P1": fake("P1", logits=Mock(side_effect=RuntimeError("a | b\nsecond\n\nthird"))),
        "P2": fake("P2", greedy_batch=Mock(side_effect=AssertionError())),
        "P3": fake("P3", greedy_batch=Mock(side_effect=[[[0] * 4], [[0] * 4], OSError("x")])),
    }
    wrong = {
        "A": fake("wrong", 0.005, greedy_batch=timed),
        "B": fake("NaN", float("nan"), greedy_batch=timed),
    }
    code, output = run("--cases", "short", **wrong, **failing)
    assert code == bench.WRONG_EXIT_CODE
    table = rows(output)
    assert table["wrong"] == ["wrong, so not timed", "", "", "", "", "", "5e-03", "", ""]
    assert table["NaN"][0] == "wrong, so not timed" and float(table["torch part4"][5]) == 1
    reasons = [f"failed: {reason}" for reason in ("a / b second", "AssertionError", "x")]
    assert [table[name] for name in failing] == [["nowhere is not installed"], *([each] for each in reasons)]
    assert run("--cases", "short", P0=missing)[0] == 0


def test_save_alone_keeps_the_figures_by_processor(run, results, monkeypatch):
    monkeypatch.setattr(machine.Load, "others", staticmethod(lambda: 0.7))
    assert run("--cases", "short,read", "--save", Other=fake("wrong", 0.005))[0] == bench.BUSY_EXIT_CODE
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


def test_a_gpus_contenders(monkeypatch, capsys):
    """Without a GPU: the steps that would be captured run one by one, and the limits are made up."""
    monkeypatch.setattr(bench, "Gpu", FakeGpu)
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(ours, "opened", Mock(side_effect=BuildError("no adapter")))
    monkeypatch.setattr(GraphPyTorch, "captured", lambda self, run: run)
    peers, engines = ("CachedPyTorch", "GraphPyTorch"), ("native", "torch", "webgpu")
    content = bench.time_on_gpu(("pair", "read"), ("fp32", "bf16"), engines, peers, 2)
    out = capsys.readouterr().out
    assert out.count("| webgpu part4 | failed: no adapter |") == 2
    assert "Fake GPU" in out and "a step moves" in out
    for title, figures in content["cases"].items():
        assert len(figures) == 4 + ("fp32" in title) and "wrong" not in out, out
        if title == "pair fp32":
            assert {f["agreement"] for f in figures.values() if "agreement" in f} == {"4 of 4"}
