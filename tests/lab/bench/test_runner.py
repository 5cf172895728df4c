"""The sweep: it verifies before it times, spreads its rounds over passes, and can be stopped."""

import itertools
import json

import pytest
from support import full, records

from shakespeare.lab import machine
from shakespeare.lab.bench import contenders, report

SMALL = ["-N", "64", "-d", "16", "-r", "2", "--min-time", "0"]


def test_a_table_of_figures_that_agree(run):
    table = records(run("part0,part4,sdpa", *SMALL, "-r", "3", "-t", "1,2", "-br", "16,32", "-bc", "16"))
    assert [row["contender"] for row in table] == ["part0", "part4", "part4", "sdpa"] * 2
    for row in table:
        ms, gflops = float(row["ms"]), float(row["GFLOP/s"])
        assert gflops == pytest.approx(4 * 4 * 64 * 64 * 16 / ms / 1e6, rel=0.02)
        assert float(row["of peak"].split()[0]) == pytest.approx(gflops, abs=0.51)  # the peak is 100 GFLOP/s
        assert float(row["error"]) < 1e-5
        same = next(r for r in table if r["contender"] == "sdpa" and r["threads"] == row["threads"])
        assert float(row["over SDPA"]) == pytest.approx(float(same["ms"]) / ms, rel=0.02)
        assert bool(row["GB/s"]) == (row["contender"] != "sdpa")
    assert {row["Br"] for row in table} == {"", "16", "32"}


def test_bfloat16(run, monkeypatch):
    monkeypatch.setattr(machine, "amx_peak", lambda threads=1: 4e11)
    done = run("--dtype", "bf16", *SMALL, "--save", "run.json")
    assert "AMX peak 400 GFLOP/s" in done.stdout and "dtype bf16" in done.stdout
    table = records(done)
    assert [row["contender"] for row in table] == ["part0", "part4", "sdpa"]
    for row in table:
        assert 1e-5 < float(row["error"]) < 1e-2
        peak = 1 if row["contender"] == "part0" else 4  # in 100 GFLOP/s; part0 computes in float32
        assert float(row["of peak"].split()[0]) == pytest.approx(float(row["GFLOP/s"]) / peak, abs=0.51)


RULES = ("none", "window=5+documents=24", "alibi+bias", "softcap=3", "sinks+bias")
FEWER = ("window=5+documents=24+alibi+bias+softcap=3", "sinks+bias")  # FlexAttention is compiled for each


@pytest.mark.parametrize("names, rules", [("part1,part4,sdpa", RULES), full("flex", FEWER)])
def test_rules(run, names, rules):
    """Every contender computes them, or says which it lacks; GFLOP/s counts the scores that are seen."""
    table = records(run(names, *SMALL, "--causal", "--rules", ",".join(rules), "-B", "2"))
    assert len(table) == len(rules) * len(names.split(","))
    for row in table:
        lacks = {"sdpa": ("softcap=3", "sinks+bias"), "flex": ("sinks+bias",)}.get(row["contender"], ())
        assert ("skipped" in row["ms"]) == (row["rules"] in lacks), row
    seen = [row for row in table if "window=5" in row["rules"]]
    assert seen
    pairs = sum(min(i % 24, 5) + 1 for i in range(64))
    for row in seen:
        assert float(row["GFLOP/s"]) == pytest.approx(8 * 4 * pairs * 16 / float(row["ms"]) / 1e6, rel=0.02)


def test_gradients_with_rules(run, monkeypatch):
    """Each is compared with float64's under the same rules."""
    rules = ("window=5+documents=24", "alibi+softcap=3", "sinks+bias")
    command = ("part0,part4,sdpa", *SMALL, "--causal", "--backward", "--rules", ",".join(rules), "-B", "2")
    for row in records(run(*command)):
        lacks = row["contender"] == "sdpa" and row["rules"] in rules[1:]
        assert ("skipped" in row["ms"]) == lacks, row
        assert lacks or float(row["error"]) < 1e-5
    right = contenders.attention
    monkeypatch.setattr(
        contenders, "attention", lambda *args, alibi_slopes=None, **rest: right(*args, **rest)
    )
    wrong = {row["rules"] for row in records(run(*command, code=1)) if "wrong" in row["ms"]}
    assert wrong == {"alibi+softcap=3"}


def test_what_is_wrong_is_shown_and_not_timed(run, monkeypatch):
    right = contenders.attention

    def wrong(part, q, k, v, **options):
        out = right("part0", q, k, v, causal=options["causal"])
        if part == "part4":
            out[0, 1, 2, 3] += 0.01
        return out

    monkeypatch.setattr(contenders, "attention", wrong)
    done = run("part0,part4", *SMALL, "-o", "json", code=1)
    part0, part4 = json.loads(done.stdout)["rows"]
    assert part0["status"] == "ok" and part4["status"] == "wrong" and part4["ms"] is None
    assert part4["error"] == pytest.approx(0.01, rel=1e-3)
    assert part4["note"].startswith("at (0, 1, 2, 3): expected ")
    assert "| part4 | wrong: at (0, 1, 2, 3): expected" in run("part0,part4", *SMALL, code=1).stdout


def test_a_contender_that_fails_is_skipped(run, monkeypatch):
    """At its check, and while it is timed."""
    right, calls = contenders.attention, []

    def fails(part, *tensors, **options):
        calls.append(part)
        if part == "part4" and calls.count(part) > allowed:
            raise OSError("no more\nof it")
        return right(part, *tensors, **options)

    monkeypatch.setattr(contenders, "attention", fails)
    for allowed in (0, 1, 5):
        calls.clear()
        part0, part4 = records(run("part0,part4", *SMALL))
        assert part4["ms"] == "skipped: no more" and float(part0["ms"]) > 0, allowed


def test_what_does_not_fit_is_skipped_and_inputs_that_do_not_are_refused(run, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 10 << 20)
    skipped, timed = records(run("part0,sdpa", "-N", 1024, "-d", 16, *SMALL[4:]))
    assert skipped["ms"].startswith("skipped: its matrices need 32 Mi") and timed["ms"]
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    for arguments in (["part0", *SMALL], ["--tune", *SMALL[:4]]):
        done = run(*arguments, code=2)
        assert "N=64, queries=64, d=16, heads=4, batch=1 need 256 KiB, and 1000 B are free" in done.stderr


# In the second round; in the second pass, before the second group's round
@pytest.mark.parametrize("calls, rounds", [(4 + 4 + 3, [1, 1]), (24 + 8 + 1, [4, 4, 2, 2])])
def test_ctrl_c_keeps_what_was_measured(run, monkeypatch, tmp_path, calls, rounds):
    """Verifying a cell takes two calls, and so does a round. A pass has two rounds."""
    right, counted = contenders.attention, itertools.count(1)

    def interrupted(*arguments, **options):
        if next(counted) == calls:
            raise KeyboardInterrupt
        return right(*arguments, **options)

    monkeypatch.setattr(contenders, "attention", interrupted)
    done = run("part3,part4", "-N", "64,128", "-d", "16", "--min-time", "0", "--save", "run.json", code=130)
    assert "Stopped before the end." in done.stdout and "| part3 |" in done.stdout
    assert "Traceback" not in done.stderr
    kept = report.load(tmp_path / "run.json")
    assert not kept.complete and [len(result.seconds) for result in kept.results][: len(rounds)] == rounds
    assert not any(result.seconds for result in kept.results[len(rounds) :])
