"""The text benchmark: verification, contenders that are left out, and figures."""

from __future__ import annotations

import json
import re
import statistics
from contextlib import ExitStack

import pytest
import torch
from click.testing import CliRunner

from attention_ext import processor
from attention_ext.build import toolchain
from benchmarks import generation as bench
from generation.engine import rounded
from lab import machine
from model import load
from model.loss import evaluate

needs_header = pytest.mark.skipif(
    not toolchain.has_python_header(), reason="no Python.h, so no native engine"
)

CASES = {
    "short": bench.Case("shakes128", 1, 1, 4),
    "pair": bench.Case("shakes128", 2, 1, 4),
    "read": bench.Case("shakes128", 1, 8, 1),
    "slow": bench.Case("shakes128", 1, 1, 4, slow_without_cache=True),
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
    monkeypatch.setattr(bench, "CASES", bench.CASES | CASES)
    monkeypatch.setattr(bench, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(bench.corpus, "INPUT", tmp_path / "none.txt")

    def run(*arguments, **others):
        monkeypatch.setattr(bench, "PEERS", others)
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
    figures = {name: bench.Figures(2e-6, "100 of 100", times) for name, times in seconds.items()}
    figures["other"].loss = 1.23456
    bench.table(case, figures, 0.05)
    table = rows(capsys.readouterr().out)
    assert table["ours"] == ["1000", "0 %", "50 %", "1.00", "2e-06", "", "100 of 100"]
    assert table["other"] == ["500", "100 %", "25 %", "2.00", "2e-06", "1.2346", "100 of 100"]
    assert table["memory limit"] == ["2000", "", "100 %", "0.50", "", "", ""]
    assert table["contender"][3] == "ours = 1"


@pytest.mark.parametrize(
    "batch, prompt, count, unit, expected",
    [
        (4, 1, 100, "tokens/s", ["4000", "0 %", "", "1.00", "0e+00", "", ""]),
        (1, 64, 1, "ms", ["100.00", "0 %", "", "1.00", "0e+00", "", ""]),
    ],
)
def test_a_batch_counts_all_texts_and_a_prompt_is_in_milliseconds(
    capsys, batch, prompt, count, unit, expected
):
    case = bench.Case("shakes128", batch, prompt, count)
    bench.table(case, {"ours": bench.Figures(0.0, "", [0.1, 0.1])}, None)
    table = rows(capsys.readouterr().out)
    assert table["ours"] == expected and table["contender"][0] == unit and "memory limit" not in table


def test_the_bytes_of_a_token():
    """Contexts have 1, 2 and 3 tokens, 2 on average. Each has K and V of 128 floats in 4 layers."""
    model = load("shakes128").model
    read = sum(t.numel() for n, t in model.named_parameters() if n != "transformer.wpe.weight") * 4
    assert bench.bytes_per_token(model, bench.Case("shakes128", 1, 1, 3)) == read + 2 * (2 * 128 * 4 * 4)


def test_a_table_for_each_case(run):
    code, output = run("--cases", "short,pair,read")
    assert code == 0
    titles = re.findall(r"^(\w+): shakes128, (\d) \+ (\d) tokens, batch (\d)$", output, re.M)
    assert titles == [("short", "1", "4", "1"), ("pair", "1", "4", "2"), ("read", "8", "1", "1")]
    texts = re.findall(r"^\| torch part4 \|.*\| ([^|]*) \|$", output, re.M)
    assert texts == ["4 of 4", "4 of 4", ""]
    assert output.count("| memory limit |") == 1  # only for the single text


@needs_header
def test_the_native_engine_writes_the_same(run):
    code, output = run("--cases", "pair", "--engines", "native", "--parts", "part0,part4")
    assert code == 0
    table = rows(output)
    ours = ["native part4", "native part4 bf16", "native part4 int8", "native part4 kv-bf16"]
    assert list(table) == ["contender", *ours]  # part0 has no native engine
    errors = [float(table[name][4]) for name in ours]
    assert errors[0] < 1e-4 < errors[1] < errors[2] < 0.5  # the rounding is visible
    assert 1e-4 < errors[3] < 0.1
    assert table["native part4"][-1] == "4 of 4" and float(table["native part4"][4]) < 1e-4


@needs_header
def test_the_loss_of_rounded_weights(run, tmp_path):
    """The engine reads token by token what evaluate() reads at once."""
    text = "First Citizen:\nWe are accounted poor citizens.\n" * 60
    file = tmp_path / "text.txt"
    file.write_text(text)
    output = run("--cases", "short,read", "--engines", "native", "--corpus", str(file))[1]
    table = rows(output.partition("read:")[0])
    checkpoint = load("shakes128")
    ids = checkpoint.tokenizer.encode(text[len(text) * 9 // 10 :])
    size = checkpoint.model.config.block_size
    whole = torch.tensor(ids[: (len(ids) - 1) // size * size + 1])
    for weights in ("bf16", "int8"):
        right = evaluate(rounded(checkpoint.model, weights), whole)
        assert float(table[f"native part4 {weights}"][5]) == pytest.approx(right, abs=2e-4)
    assert table["native part4"][5] == ""
    stated = re.findall(r"^The loss of fp32 over (\S+) tokens is (\S+) nats$", output, re.M)
    assert len(stated) == 1  # a case that only reads has no texts
    assert int(stated[0][0]) == len(whole) - 1
    assert float(stated[0][1]) == pytest.approx(evaluate(checkpoint.model, whole), abs=1e-4)


def test_what_is_wrong_is_not_timed(run):
    def fail(texts):
        raise AssertionError("a wrong one was timed")

    wrong = {"A": Fake("wrong", 0.005, fail), "B": Fake("NaN", float("nan"), fail)}
    code, output = run("--cases", "short", **wrong)
    assert code == 0
    table = rows(output)
    assert table["wrong"] == ["wrong, so not timed", "", "", "", "5e-03", "", ""]
    assert table["NaN"][0] == "wrong, so not timed"
    assert float(table["torch part4"][3]) == 1


def test_llama_cpp_may_err_more(run):
    table = rows(run("--cases", "short", LlamaCpp=Fake("llama.cpp 1", 0.005))[1])
    assert table["llama.cpp 1"][4:] == ["5e-03", "", "4 of 4"]
    table = rows(run("--cases", "short", LlamaCpp=Fake("llama.cpp 1", 0.05))[1])
    assert table["llama.cpp 1"][0] == "wrong, so not timed"


def test_another_text_is_reported_and_timed(run):
    def third(texts):
        return [[*text[:2], (text[2] + 1) % 65, text[3]] for text in texts]

    table = rows(run("--cases", "short", Other=Fake("other", change=third))[1])
    assert table["other"][-1] == "2 of 4" and float(table["other"][0]) > 0


def test_texts_of_a_batch_are_held_against_one_alone(run):
    def last_of_several(texts):
        return texts if len(texts) == 1 else [texts[0], [*texts[1][:3], (texts[1][3] + 1) % 65]]

    table = rows(run("--cases", "pair", Other=Fake("other", change=last_of_several))[1])
    assert table["other"][-1] == "3 of 4, 3 as when alone"


def test_what_is_not_installed_takes_no_part(run):
    def absent(model, threads):
        raise ImportError("absent")

    code, output = run("--cases", "short,pair", Absent=absent)
    assert code == 0
    assert output.count("Absent is not installed") == 1 and "| Absent" not in output


def test_what_is_slow_is_left_out_unless_asked_for(run):
    slow = {"UncachedPyTorch": Fake("no cache")}
    output = run("--cases", "short,slow", **slow)[1]
    assert "slow: UncachedPyTorch is slow and left out" in output and output.count("| no cache |") == 1
    output = run("--cases", "short,slow", "--slow", **slow)[1]
    assert "left out" not in output and output.count("| no cache |") == 2


def test_contenders_take_turns(run):
    """The warm-up of each comes first, then the rounds."""
    order = []

    def note(name):
        return lambda texts: order.append(name) or texts

    run("--cases", "short", "--rounds", "3", A=Fake("a", change=note("a")), B=Fake("b", change=note("b")))
    assert order == ["a", "b"] + 3 * ["a", "b"]


def test_the_figures_are_kept(run, tmp_path):
    file = tmp_path / "figures.json"
    assert run("--cases", "short", "--save", str(file), Other=Fake("wrong", 0.005))[0] == 0
    kept = json.loads(file.read_text())
    ours, wrong = kept["cases"]["short"]["torch part4"], kept["cases"]["short"]["wrong"]
    assert len(ours["seconds"]) == 2 and ours["agreement"] == "4 of 4" and ours["error"] < 1e-4
    assert (
        wrong["seconds"] == []
        and "loss" not in wrong
        and kept["threads"] == 1
        and kept["machine"]["torch"] == torch.__version__
    )


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


def test_where_figures_cannot_be_kept(run, tmp_path):
    """It is refused before anything is measured."""
    for file in (tmp_path / "nowhere" / "x.json", "/dev/null"):
        code, output = run("--cases", "short", "--save", str(file))
        assert code == 2 and "it must be a file" in output and "| contender |" not in output


def test_a_busy_machine_is_named(run, monkeypatch):
    monkeypatch.setattr(bench.Load, "others", staticmethod(lambda: 0.7))
    code, output = run("--cases", "short")
    assert code == 3 and "The machine was busy: others took 0.70 processors" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cases", "x"],
        ["--engines", "x"],
        ["--parts", "x"],
        ["--peers", "x"],
        ["--weights", "x"],
        ["--rounds", "1"],
    ],
)
def test_wrong_arguments(run, arguments):
    code, output = run(*arguments)
    assert code == 2 and ("'x' must be one of" in output or "--rounds" in output)


def test_a_contender_in_a_process_of_its_own(extension, threads):
    ids = [3, 1, 4, 1, 5]
    with ExitStack() as stack:
        apart = bench.remote(bench.Contender("torch", "part4"), "batch1", 2, stack)
        seconds, text = apart.call("greedy", ids, 6)
        _, logits = apart.call("logits", ids)
    here = bench.local(bench.Contender("torch", "part4"), "batch1", 1).call
    assert apart.name == "torch part4" and seconds > 0
    assert text == here("greedy", ids, 6)[1]
    torch.testing.assert_close(torch.tensor(logits), torch.tensor(here("logits", ids)[1]))


def test_the_bandwidth_is_plausible(extension):
    assert 1e8 < machine.read_rate(100_000, 0.02) < 1e13


def test_a_contender_has_a_name_and_an_error_bound():
    ours = bench.Contender("native", "part4")
    bf16 = bench.Contender("native", "part4", bench.Precision.BF16)
    assert (ours.name, bf16.name) == ("native part4", "native part4 bf16")
    llama, other = bench.Contender("LlamaCpp"), bench.Contender("CTranslate2")
    assert bf16.rounded and not ours.rounded and bench.Contender("LlamaCppQ8").rounded
    assert bf16.most_error > llama.most_error > other.most_error == ours.most_error
    assert bench.MOST_ERROR_OF_PEERS.keys() <= bench.PEERS.keys()
    assert bench.MOST_ERROR_OF_WEIGHTS.keys() == set(bench.Precision)
