"""gpt.py bench: it verifies before it times, sweeps what it is asked for, and judges differences."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import mmap
import platform
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from support import ROOT

from attention_ext import PARTS, build
from lab import bench, compare, machine, plots, report, sweep, timing

SMALL = ["-N", "64", "-d", "16", "-r", "2", "--min-time", "0"]


@pytest.fixture
def steady(quiet, monkeypatch):
    """A quiet, steady machine."""
    quiet(bench.machine)
    monkeypatch.setattr(bench.machine, "page_faults", lambda: 0)
    monkeypatch.setattr(bench.machine, "read_bandwidth", lambda size, threads=1: 1e10)


@pytest.fixture
def run(steady, cli):
    """Run `gpt.py bench` over small cases on a quiet, steady machine."""
    return lambda *arguments: cli("bench", *arguments)


def rows(done):
    """The Markdown table as dictionaries."""
    assert done.returncode == 0, done.stderr
    lines = [line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    return [dict(zip(map(str.strip, lines[0]), map(str.strip, line))) for line in lines[2:]]


def made(change=1.0, rounds=10, **fields):
    """A run with figures that are known: 1 ms with a little spread, times `change`."""
    done = bench.Run(
        {"cpu": "a", "date": "today", "caches": [], "cores": 1}
        | dict.fromkeys(("isa", "simd", "os", "python", "torch", "commit"), "x"),
        rounds,
        0.1,
        1 << 20,
    )
    done.peaks, done.bandwidths, done.complete = {1: 1e11, 2: 2e11}, {1: 1e10, 2: 2e10}, True
    sizes = dict(lengths=(64, 128), widths=(16,), threads=(1, 2)) | fields
    for cell in bench.plan(["part0", "part4", "sdpa"], **sizes):
        factor = change if cell.contender == "part4" else 1
        seconds = [1e-3 * cell.N / 64 * factor * (1 + 0.001 * i) for i in range(rounds)]
        result = bench.Result(cell, error=1e-7, error_at=(0, 0, 0, 0), scratch=1000, seconds=seconds)
        result.paces = [1.0] * rounds
        done.results.append(result)
    return done


def test_a_plan_is_every_contender_at_every_case():
    cells = bench.plan(
        ["part0", "part4", "sdpa"],
        lengths=(8, 16),
        widths=(4,),
        masks=(False, True),
        br=(2, None),
        bc=(3,),
        threads=(1, 2),
        simds=("portable", "off"),
    )
    assert len(cells) == 2 * 2 * 2 * (1 + 4 + 1)
    assert len({cell.group for cell in cells}) == 8
    assert {(cell.br, cell.bc) for cell in cells} == {(None, None), (2, 3), (bench.tiles.DEFAULT[0], 3)}
    assert {cell.simd for cell in cells if cell.contender != "part4"} == {None}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(names=["part7"]), "contender is 'part7'; it must be one of part0,"),
        (dict(names=["part0", "part0"]), "contender is 'part0,part0'; it must name one or more, each once"),
        (dict(names=[]), "it must name one or more"),
        (dict(names=["part1"], simds=["sse"]), "simd is 'sse'; it must be one of auto,"),
        (dict(names=["part1"], queries=5, masks=[True]), "queries is 5; with a causal mask it must be 1 or"),
    ],
)
def test_a_wrong_plan(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench.plan(**arguments)


def test_the_flops_and_bytes_of_a_cell():
    part2, sdpa = bench.plan(["part2", "sdpa"], lengths=[64], widths=[16], batch=2, heads=3)
    assert part2.flops == sdpa.flops == 4 * 6 * 64 * 64 * 16
    assert part2.traffic(1 << 30) >= 6 * 4 * 64 * 16 * 4 and sdpa.traffic(1 << 30) is None


def test_a_table_of_figures_that_agree(run):
    table = rows(run("part0,part4,sdpa", *SMALL, "-r", "3", "-t", "1,2", "-br", "16,32", "-bc", "16"))
    assert [row["contender"] for row in table] == ["part0", "part4", "part4", "sdpa"] * 2
    for row in table:
        ms, gflops = float(row["ms"]), float(row["GFLOP/s"])
        assert gflops == pytest.approx(4 * 4 * 64 * 64 * 16 / ms / 1e6, rel=0.02)
        assert float(row["of peak"].split()[0]) == pytest.approx(gflops, abs=0.51)  # it is 100 GFLOP/s
        assert float(row["error"]) < 1e-5
        same = next(r for r in table if r["contender"] == "sdpa" and r["threads"] == row["threads"])
        assert float(row["over SDPA"]) == pytest.approx(float(same["ms"]) / ms, rel=0.02)
        assert bool(row["GB/s"]) == (row["contender"] != "sdpa")
    assert {row["Br"] for row in table} == {"", "16", "32"}


def test_what_is_the_same_everywhere_stands_above(run):
    done = run("part0,sdpa", *SMALL, "--causal")
    assert "N 64, d 16, batch 1, heads 4, mask causal, threads 1" in done.stdout
    assert list(rows(done)[0])[:2] == ["contender", "ms"]
    assert "1 thread: FMA peak 100 GFLOP/s, 10 GB/s from beyond" in done.stdout


def test_one_query_and_onnx(run):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    for mask in ("none", "causal"):
        table = rows(run("part3,part4,sdpa,onnx", *SMALL, "--mask", mask))
        assert [row["contender"] for row in table] == ["part3", "part4", "sdpa", "onnx"]
    assert len(rows(run("part4,sdpa", *SMALL, "--queries", 1))) == 2


def test_what_is_wrong_is_shown_and_not_timed(run, monkeypatch):
    right = bench.attention

    def wrong(part, q, k, v, **options):
        out = right("part0", q, k, v, causal=options["causal"])
        if part == "part4":
            out[0, 1, 2, 3] += 0.01
        return out

    monkeypatch.setattr(bench, "attention", wrong)
    done = run("part0,part4", *SMALL, "-o", "json")
    part0, part4 = json.loads(done.stdout)["rows"]
    assert part0["status"] == "ok" and part4["status"] == "wrong" and part4["ms"] is None
    assert part4["error"] == pytest.approx(0.01, rel=1e-3)
    assert part4["note"].startswith("at (0, 1, 2, 3): expected ")
    assert "| part4 | wrong: at (0, 1, 2, 3): expected" in run("part0,part4", *SMALL).stdout


def test_a_nan_is_wrong(run, monkeypatch):
    monkeypatch.setattr(bench, "attention", lambda part, q, k, v, **options: torch.full_like(q, torch.nan))
    assert "wrong: at (0, 0, 0, 0)" in run("part1", *SMALL).stdout


def test_what_does_not_fit_is_skipped(run, monkeypatch):
    monkeypatch.setattr(bench.machine, "available_memory", lambda: 10 << 20)
    done = run("part0,sdpa", "-N", 1024, "-d", 16, *SMALL[4:])
    assert [row["ms"][:20] for row in rows(done)][0] == "skipped: needs 48 Mi"
    assert rows(done)[1]["ms"]


def test_inputs_that_do_not_fit_are_refused(run, monkeypatch):
    monkeypatch.setattr(bench.machine, "available_memory", lambda: 1000)
    for arguments in (["part0", *SMALL], ["--tune", *SMALL[:4]]):
        done = run(*arguments)
        assert done.returncode == 2
        assert "N=64, queries=64, d=16, heads=4, batch=1 need 256 KiB, and 1000 B are free" in done.stderr


def test_a_busy_machine_is_named(run, monkeypatch):
    monkeypatch.setattr(bench.machine.Load, "others", staticmethod(lambda: 0.7))
    done = run("sdpa", *SMALL)
    assert done.returncode == 0
    for text in (done.stdout, done.stderr):
        assert "The machine was busy: others took 0.70 processors on average; these figures are" in text


def test_a_changing_peak_is_named(monkeypatch):
    load = machine.Load()
    monkeypatch.setattr(load, "others", lambda: 0.0)
    assert machine.busy(load, [1e11, 1.02e11], 1) is None
    assert "the FMA peak went from 100 to 80 GFLOP/s" in machine.busy(load, [1e11, 0.8e11], 1)


@pytest.mark.parametrize("rates, slowed", [([1e11, 9.7e10, 9e10, 1e11], 25), ([9e10, 8.8e10], 0), ([], 0)])
def test_slowed_reading_is_named(rates, slowed, monkeypatch):
    """As by who shares the last cache with this core but not its time."""
    reads = iter(rates)
    fake = types.SimpleNamespace(read_bandwidth=lambda size, seconds: next(reads))
    monkeypatch.setattr(machine.build, "load", lambda: fake)
    load = machine.Load()
    monkeypatch.setattr(load, "others", lambda: 0.0)
    fastest = 0.0
    for rate in rates:
        fastest = max(fastest, rate)
        assert load.sample(1 << 20) == rate / fastest
    assert load.slowed() == slowed / 100
    said = machine.busy(load, [1e11, 1e11], 1)
    assert (f"in {slowed} % of samples; these figures are not firm" in said) if slowed else said is None


def test_a_sample_waits_until_reading_is_fast(monkeypatch):
    """For so long at most; only what it found first tells how often reading was slow."""
    rates = iter([100.0, 90.0, 94.0, 95.0, 80.0])
    fake = types.SimpleNamespace(read_bandwidth=lambda size, seconds: next(rates, 50.0))
    monkeypatch.setattr(machine.build, "load", lambda: fake)
    load = machine.Load()
    assert load.sample(1 << 20, patience=9) == 1
    assert load.sample(1 << 20, patience=9) == 0.95 and load.slowed() == 1 / 2
    assert load.sample(1 << 20) == 0.8
    assert load.sample(1 << 20, patience=0.01) == 0.5 and load.slowed() == 3 / 4


def test_a_sweep_samples_its_machine(run, monkeypatch):
    sizes: list[int] = []

    def sample(size, patience=0.0):
        sizes.append(size)
        return 0.9

    monkeypatch.setattr(bench, "FURTHER", 0)  # passes through what is not firm
    monkeypatch.setattr(bench.machine.Load, "sample", staticmethod(sample))
    monkeypatch.setattr(bench.machine.Load, "slowed", staticmethod(lambda: 0.5))
    assert "the shared cache was slow in 50 % of samples" in run("sdpa", *SMALL, "-r", "4").stdout
    assert sizes == [4 * machine.caches()[:2][-1].size] * (bench.PRIMED + 2 * 4)


def test_what_was_not_slowed_counts():
    """By its pace alone, at the limit too; `least` at least, the fastest by their paces."""
    assert timing.calm("abcd", [1.0, 0.949, 0.95, 0.2], 1) == ["a", "c"]
    assert timing.calm("abcd", [0.5, 0.949, 0.3, 0.2], 1) == ["b"]
    assert timing.calm("abcd", [0.5, 0.96, 0.3, 0.2], 3) == ["a", "b", "c"]
    assert timing.calm("abcd", [0.5, 0.96, 0.3, 0.2], 6) == ["a", "b", "c", "d"]
    assert timing.calm([], [], 6) == []


def test_a_round_is_what_its_fast_bursts_took(monkeypatch):
    """Three bursts of two calls; the second is beside a slow moment, so that the pace is awaited after it."""
    paces = iter([1.0, 1.0, 0.5, 0.97, 0.96])
    waits, now = [], [0.0]
    takes = iter([1.0, 2.0, 100.0, 100.0, 3.0, 4.0])

    def pace(wait):
        waits.append(wait)
        now[0] += 1000  # is no call's time
        return next(paces)

    def call():
        now[0] += next(takes)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    timed = timing.clock(call, [2, 2, 2], pace)
    assert timed == (2.5, 1.0, 210.0, timed.pages)
    assert waits == [True, False, False, True, False]
    paces, takes = iter([0.4, 0.6, 0.6, 0.5]), iter([1.0, 2.0])
    assert timing.clock(call, [1, 1], lambda wait: next(paces))[:3] == (2.0, 0.5, 3.0)


def test_waiting_takes_a_tenth_of_the_time(steady, monkeypatch):
    patiences, now = [], [0.0]
    measured = bench.Bench(bench.plan(["sdpa"]))

    def sample(size, patience=0.0):
        patiences.append(patience)
        now[0] += patience
        return 0.5

    monkeypatch.setattr(measured._load, "sample", sample)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    measured._start = now[0] - 1.0
    assert [measured._pace(wait=True) for _ in range(100)] == [0.5] * 100
    assert 0.1 <= sum(patiences) < 0.15 and max(patiences) == bench.PATIENCE
    patiences.clear()
    measured._start -= 9
    measured._pace()
    assert patiences == [0.0]


def test_slowed_rounds_are_left_out(tmp_path, cli):
    """Of ten rounds: three that were slowed; then five, of which one counts lest there be fewer than six."""
    done = made(lengths=(64,), threads=(1,))
    for result, slowed in zip(done.results, (0, 3, 5)):
        result.seconds[:slowed] = [1e-3 * (2 + i) for i in range(slowed)]
        result.paces[:slowed] = [0.9 + 0.01 * i for i in range(slowed)]
    report.save(done, tmp_path / "run.json")
    assert report.load(tmp_path / "run.json") == done
    table = rows(cli("bench", "--load", "run.json"))
    assert [row["left out"] for row in table] == ["0", "3", "4"]
    assert [result.median for result in done.results] == pytest.approx([1.0045e-3, 1.006e-3, 1.0075e-3])
    assert max(done.results[2].counted) == 6e-3 and len(done.results[2].seconds) == 10
    report.save(made(), tmp_path / "run.json")
    assert "left out" not in rows(cli("bench", "--load", "run.json"))[0]


def test_the_load_of_others_is_what_this_process_did_not_use(monkeypatch):
    """Processor seconds of the machine, of this process, wall seconds: 5 - 2 by others in 4."""
    readings = iter([(100.0, 10.0, 1000.0), (105.0, 12.0, 1004.0)])
    monkeypatch.setattr(machine.Load, "_now", staticmethod(lambda: next(readings)))
    assert machine.Load().others() == pytest.approx(0.75)
    monkeypatch.setattr(machine.Load, "_now", staticmethod(lambda: None))
    assert machine.Load().others() is None


def test_the_limits_are_plausible(extension):
    assert 1e9 < machine.fma_peak() < 1e12
    assert 1e8 < machine.read_bandwidth(1 << 20) < 1e13
    assert 1e8 < build.load().read_bandwidth(1 << 20, 0.0) < 1e13  # it reads once however short the time
    assert 1e-10 < machine.fma_latency() < 1e-7
    assert machine.fma_peak() * machine.fma_latency() > 4  # two operations of more than two at a time
    sizes = [cache.size for cache in machine.caches()]
    assert sizes == sorted(sizes) and len(sizes) >= 2


def test_a_dry_run_prints_the_plan_alone(cli):
    done = cli(
        "bench",
        "part0,part4,sdpa",
        "-N",
        "256:4096*2",
        "-d",
        "32,64",
        "-br",
        "32,64,128",
        "-bc",
        "64,256",
        "-t",
        "1,2",
        "--dry-run",
    )
    assert done.returncode == 0
    assert done.stdout.startswith("160 cells, 10 rounds each\n") and done.stdout.count("\n") == 161
    assert "part4, SIMD auto, N 256, queries 256, d 32, batch 1" in done.stdout
    assert "Br 128, Bc 256" in done.stdout and "sdpa, N 256" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["part9"], "contender is 'part9'"),
        (["-N", "0"], "'0' must be a number of at least 1"),
        (["-N", "8:4"], "'8:4' goes down"),
        (["-N", "1:9*1"], "must be a number"),
        (["-N", "1:5000"], "more than 1000 numbers"),
        (["-N", "auto"], "must be a number"),
        (["-br", "x"], "a range as 256:4096*2 or 1:9+2 or auto"),
        (["--mask", "both"], "--mask is 'both'"),
        (["-r", "1"], "1 is not in the range"),
        (["--show"], "--show goes with --tune only"),
        (["part1,sdpa", "-br", "64"], "-br and -bc go with part4 only"),
        (["sdpa", "--dry-run", "--save", "x.json"], "--save does not go with --dry-run"),
        (["--fail-on-regression"], "--fail-on-regression goes with --compare only"),
        (["--tune", "part4"], "CONTENDERS does not go with --tune"),
        (["--compare", "nowhere.json"], "nowhere.json"),
        (["--save", "nowhere/run.json", "sdpa"], "save is 'nowhere/run.json'"),
    ],
)
def test_wrong_arguments(cli, arguments, message):
    done = cli("bench", *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_ranges():
    from gpt import Numbers

    def numbers(text):
        return Numbers(auto=True).convert(text, None, None)

    assert numbers("32,64") == (32, 64)
    assert numbers("256:4096*2") == (256, 512, 1024, 2048, 4096)
    assert numbers("1:9+3,5") == (1, 4, 7, 5)
    assert numbers("2:4,auto") == (2, 3, 4, None)
    assert numbers("100:150*2") == (100,)


def test_every_form_holds_the_same_figures(run, tmp_path):
    assert run("part0,part4", *SMALL, "--save", "run.json").returncode == 0
    whole = json.loads(run("--load", "run.json", "-o", "json").stdout)
    assert [result["cell"]["contender"] for result in whole["results"]] == ["part0", "part4"]
    lines = run("--load", "run.json", "-o", "jsonl").stdout.splitlines()
    table = list(csv.DictReader(io.StringIO(run("--load", "run.json", "-o", "csv").stdout)))
    for row, line, record in zip(whole["rows"], map(json.loads, lines), table, strict=True):
        assert row.items() <= line.items() and line["torch"] == torch.__version__
        assert float(record["ms"]) == row["ms"] and record["contender"] == row["contender"]
    assert len(rows(run("--load", "run.json"))) == 2


def test_a_saved_run_is_read_as_it_was(tmp_path):
    done = made()
    report.save(done, tmp_path / "run.json")
    assert report.load(tmp_path / "run.json") == done
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


OTHER = ["", "[]", "{}", '{"format": 99}', '{"format": 2, "results": [1]}', "cell", "time", "pace", "paces"]


@pytest.mark.parametrize("content", OTHER)
def test_another_file_is_refused(tmp_path, content, cli):
    file = tmp_path / "run.json"
    report.save(made(), file)
    if content == "cell":
        content = file.read_text().replace('"heads"', '"hands"')
    elif content == "time":
        content = file.read_text().replace('"seconds": [', '"seconds": [-1,')
    elif content == "pace":
        content = file.read_text().replace("1.0\n", "1.5\n")
    elif content == "paces":
        content = file.read_text().replace('"paces": [', '"paces": [1.0,')
    file.write_text(content)
    done = cli("bench", "--load", file)
    assert done.returncode == 2 and "run.json is not a run that bench saved" in done.stderr


def test_a_run_compared_with_itself_reports_nothing(tmp_path, cli):
    pytest.importorskip("scipy")
    report.save(made(), tmp_path / "run.json")
    done = cli("bench", "--load", "run.json", "--compare", "run.json", "--fail-on-regression")
    assert done.returncode == 0
    assert done.stdout.endswith("|\n\nNo difference above 5 % and above chance in 12 cells.\n")


@pytest.mark.parametrize("change, code, word", [(1.2, 1, "+20.0 % slower"), (0.8, 0, "-20.0 % faster")])
def test_a_real_difference_is_reported(tmp_path, cli, change, code, word):
    pytest.importorskip("scipy")
    report.save(made(), tmp_path / "old.json")
    report.save(made(change), tmp_path / "new.json")
    done = cli("bench", "--load", "new.json", "--compare", "old.json", "--fail-on-regression")
    assert done.returncode == code
    assert done.stdout.count(word) == 4 and "4 of 12 cells differ" in done.stdout
    assert cli("bench", "--load", "new.json", "--compare", "old.json").returncode == 0
    done = cli("bench", "--load", "new.json", "--compare", "old.json", "--threshold", 30)
    assert "\nNo difference above 30 %" in done.stdout


def test_chance_is_not_reported(tmp_path):
    """The same distribution, wide apart: medians differ by more than 5 % by chance alone."""
    pytest.importorskip("scipy")
    before, now = made(), made()
    generator = torch.Generator().manual_seed(0)
    for run_ in (before, now):
        for result in run_.results:
            result.seconds = (1e-3 * (1 + torch.rand(10, generator=generator))).tolist()
    medians = [abs(a.median / b.median - 1) for a, b in zip(before.results, now.results)]
    assert max(medians) > compare.THRESHOLD
    compared = compare.compare(before, now)
    assert (compared.cells, compared.differences, compared.worse) == (12, [], False)


def test_one_slow_cell_of_many_is_found():
    """Among as many cells as a sweep has, with the rounds that it has."""
    pytest.importorskip("scipy")
    lengths = range(1, 28)
    before, now = made(lengths=lengths), made(lengths=lengths)
    assert len(now.results) == 162
    compare.check(before, [result.cell for result in now.results], 10)
    now.results[70].seconds = [2 * s for s in now.results[70].seconds]
    (found,) = compare.compare(before, now).differences
    assert found.cell == now.results[70].cell and found.change == pytest.approx(1.0)


def test_what_is_wrong_now_is_worse(tmp_path, cli):
    pytest.importorskip("scipy")
    report.save(made(), tmp_path / "old.json")
    now = made()
    now.results[1].status, now.results[1].note = "wrong", "at (0, 0, 0, 0): ..."
    now.results[1].seconds, now.results[1].paces = [], []
    report.save(now, tmp_path / "new.json")
    done = cli("bench", "--load", "new.json", "--compare", "old.json", "--fail-on-regression")
    assert done.returncode == 1
    assert "Right before, wrong now: part4, SIMD auto, N 64" in done.stdout


def test_cells_without_a_partner_are_counted(tmp_path, cli):
    pytest.importorskip("scipy")
    compared = compare.compare(made(lengths=(64, 128)), made(lengths=(64, 128, 256, 512)))
    assert (compared.cells, compared.alone) == (12, (0, 12))
    assert "0 cells of before and 12 of now" in compare.text(compared, made(), made(), 0.05)


def test_runs_that_cannot_be_compared(tmp_path, cli):
    """It is said before anything is measured."""
    pytest.importorskip("scipy")
    report.save(made(), tmp_path / "run.json")
    done = cli("bench", "part4", "-N", "32", "-d", "8", "--compare", "run.json")
    assert done.returncode == 2 and "no cell was timed in both runs" in done.stderr
    done = cli("bench", "part0,sdpa", "-N", "64,128", "-d", "16", "-r", "3", "--compare", "run.json")
    assert done.returncode == 2 and "the runs have 10 and 3 rounds, too few to tell" in done.stderr


def test_a_run_is_kept_in_files_alone(tmp_path, cli, run, monkeypatch):
    done = cli("bench", "sdpa", "-N", "8", "--save", tmp_path)
    assert done.returncode == 2
    done = cli("bench", "sdpa", "-N", "8", "--save", "/dev/null")
    assert done.returncode == 2 and "save is '/dev/null'; it must be a file" in done.stderr
    report.save(made(), tmp_path / "run.json")
    kept = (tmp_path / "run.json").read_text()

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "attention", interrupted)
    assert run("part4", *SMALL, "--save", "run.json").returncode == 130
    assert (tmp_path / "run.json").read_text() == kept


def test_pictures(tmp_path, cli):
    pytest.importorskip("matplotlib")
    report.save(made(br=(16, 32), bc=(16, 32)), tmp_path / "run.json")
    done = cli("bench", "--load", "run.json", "--plot", "pictures")
    names = {file.name for file in (tmp_path / "pictures").iterdir()}
    expected = ("time", "tiles", "roofline", "threads", "memory")
    assert names == {f"{name}.{form}" for name in expected for form in ("svg", "png")}
    assert done.stderr.count("wrote ") == 10
    svg = (tmp_path / "pictures" / "time.svg").read_text()
    assert svg.startswith("<?xml")
    cli("bench", "--load", "run.json", "--plot", "again")
    assert (tmp_path / "again" / "time.svg").read_text() == svg


def test_pictures_show_the_runs_figures():
    pytest.importorskip("matplotlib")
    figure = plots.time(made())
    assert len(figure.axes) == 2  # 1 and 2 threads
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"part0", "part4", "PyTorch SDPA"}
    assert lines["part4"].get_xdata().tolist() == [64, 128]
    assert lines["part4"].get_ydata() == pytest.approx([1.0045, 2.009])
    looks = {(line.get_marker(), line.get_linestyle()) for line in lines.values()}
    assert len(looks) == 3  # legible without colour
    assert plots.tiles(made()) is None and plots.scaling(made(threads=(1,))) is None
    assert set(plots.LOOK) == set(bench.contenders())


@pytest.mark.parametrize(
    "rounds, passes", [(2, [1, 1]), (5, [1] * 5), (7, [2, 2, 1, 1, 1]), (10, [2] * 5), (13, [3, 3, 3, 2, 2])]
)
def test_rounds_are_divided_among_the_passes(rounds, passes):
    assert timing.spread(rounds, bench.PASSES) == passes


def test_every_group_is_timed_in_every_pass(steady, monkeypatch):
    """Memory is returned between the passes, not before the first; what is wrong is in the first alone."""
    monkeypatch.setattr(bench.machine, "return_freed_memory", lambda: passes.append([]))
    monkeypatch.setattr(bench, "FURTHER", 0)
    right, passes = bench.attention, [[]]

    def seen(part, q, k, v, **options):
        passes[-1].append((part, q.shape[2]))
        out = right(part, q, k, v, **options)
        return out + 1 if part == "part3" else out

    monkeypatch.setattr(bench, "attention", seen)
    cells = bench.plan(["part0", "part3", "part4"], lengths=(32, 64), widths=(8,))
    measured = bench.Bench(cells, rounds=7, min_time=0)
    counts = []
    for _ in measured.run():
        counts.append([len(result.seconds) for result in measured.done.results])
    assert measured.done.complete
    assert [result.cell for result in measured.done.results] == cells
    assert [len(result.seconds) for result in measured.done.results] == [7, 0, 7] * 2
    for number, (calls, rounds) in enumerate(zip(passes, [2, 2, 1, 1, 1], strict=True)):
        each = 2 * rounds + 2 * (number == 0)  # a round and what clears the caches; verified
        assert [N for N, _ in itertools.groupby(N for _, N in calls)] == [32, 64]
        assert [calls.count((part, N)) for part in ("part0", "part4") for N in (32, 64)] == [each] * 4
        assert [part for part, _ in calls].count("part3") == 2 * (number == 0)
    for shown in ([2, 0, 2, 2, 0, 2], [4, 0, 4, 2, 0, 2], [4, 0, 4, 4, 0, 4], [5, 0, 5, 4, 0, 4]):
        assert shown in counts


def test_what_is_not_firm_is_timed_in_further_passes(steady, monkeypatch):
    """Few threads first, 2 rounds a pass, until it is firm or the time is over."""
    cells = bench.plan(["part0", "part4"], lengths=(32, 64), widths=(8,), threads=(2, 1))
    wanted = {("part4", 32, 2): 13, ("part4", 64, 1): 15}

    def margin(result):
        cell = result.cell
        return len(result.seconds) < wanted.get((cell.contender, cell.N, cell.threads), 0)

    def rounds(share):
        monkeypatch.setattr(bench, "SHARE", share)
        measured = bench.Bench(cells, rounds=10, min_time=0)
        again = [(cell.contender, cell.N, cell.threads) for cell, _ in measured.run() if measured.again]
        assert measured.done.complete
        return [len(result.seconds) for result in measured.done.results], list(dict.fromkeys(again))

    monkeypatch.setattr(bench.Result, "margin", property(margin))
    order = [("part4", 64, 1), ("part4", 32, 2)]
    assert rounds(share=100) == ([10, 14, 10, 10, 10, 10, 10, 16], order)
    assert rounds(share=0) == ([10] * 8, [])
    monkeypatch.setattr(bench, "FURTHER", 1)
    assert rounds(share=100) == ([10, 12, 10, 10, 10, 10, 10, 12], order)


@pytest.mark.parametrize("asked, taken", [(10, 16), (4, 10)])
def test_what_was_slowed_is_timed_in_further_passes(steady, monkeypatch, asked, taken):
    """Until six rounds, or as many as were asked for, were between fast samples: here each third one."""
    paces = itertools.cycle([1.0, 0.5, 0.5])
    monkeypatch.setattr(bench, "clock", lambda call, bursts, pace: timing.Round(1e-3, next(paces), 1e-3, 0))
    monkeypatch.setattr(bench, "SHARE", 1e6)
    measured = bench.Bench(bench.plan(["sdpa"], lengths=(32,), widths=(8,)), rounds=asked, min_time=0)
    assert all(measured.run())
    (result,) = measured.done.results
    assert len(result.seconds) == len(result.paces) == taken
    assert asked == 4 or len(result.counted) == 6


def test_a_round_with_new_pages_is_measured_again(steady, monkeypatch):
    """Up to four times; what gets new pages in every call, once in each pass."""
    right, pages, calls = bench.attention, [0], {"part0": 0, "part3": 0, "part4": 0}

    def faulting(part, q, k, v, **options):
        calls[part] += 1
        # Part 3: 2 calls verify it, 1 is untimed.
        if part == "part0" or (part, calls[part]) == ("part3", 4):
            pages[0] += 10**6
            time.sleep(0.1 * (part == "part3"))
        return right(part, q, k, v, **options)

    monkeypatch.setattr(bench, "attention", faulting)
    monkeypatch.setattr(bench, "FURTHER", 0)
    monkeypatch.setattr(bench.machine, "page_faults", lambda: pages[0])
    measured = bench.Bench(bench.plan([*calls], lengths=(32,), widths=(8,)), rounds=10, min_time=0)
    assert all(measured.run())
    assert [len(result.seconds) for result in measured.done.results] == [10] * 3
    usual = 2 + 5 * 2 * 2
    assert calls == {"part0": usual + 5 * 3, "part3": usual + 1, "part4": usual}
    assert max(measured.done.results[1].seconds) < 0.1


def test_page_faults_are_counted():
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:  # the heap may have pages from before
        before = bench.machine.page_faults()
        memory.write(b"x" * len(memory))
        assert bench.machine.page_faults() > before


def test_further_passes_keep_the_rounds_that_there_were(steady, monkeypatch):
    """Here part 0 is loose once part 4 has had a pass more; stopped in a round, neither keeps that one."""
    measured = bench.Bench(bench.plan(["part0", "part4"], lengths=(32,), widths=(8,)), rounds=10, min_time=0)

    def counts():
        return [len(result.seconds) for result in measured.done.results]

    def margin(result):
        part0, part4 = counts()
        return part4 >= 12 > part0 if result.cell.contender == "part0" else part4 < 14

    monkeypatch.setattr(bench.Result, "margin", property(margin))
    monkeypatch.setattr(bench, "SHARE", 100)
    assert all(measured.run()) and counts() == [12, 14]
    measured.done.results.clear()
    with contextlib.closing(measured.run()) as run:
        next(each for each in run if counts() == [11, 12])
    assert counts() == [10, 12] and measured.done.complete


FREED = """
import os, torch
from lab import machine

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

machine.keep_freed_memory()
block = torch.ones(64 << 20, dtype=torch.uint8)
above = torch.ones(1 << 10)  # keeps the block from being the heap's end
del block
kept = resident()
machine.return_freed_memory()
print(kept - resident(), int(above.sum()))
"""


def test_freed_memory_is_returned():
    """In a process of its own: where a block lies depends on all that was allocated before."""
    if not Path("/proc/self/statm").exists() or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs Linux and glibc")
    done = subprocess.run([sys.executable, "-c", FREED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    returned, total = map(int, done.stdout.split())
    assert returned > 60 << 20 and total == 1 << 10


@pytest.mark.parametrize(
    "rounds, k", [(1, 1), (2, 1), (5, 1), (6, 1), (8, 1), (9, 2), (10, 2), (12, 3), (15, 4), (100, 40)]
)
def test_the_interval_of_a_median(rounds, k):
    """Of 10 the 2nd and the 9th, which cover it with 97.9 %; the next ones would with less than 95 %."""
    seconds = torch.randperm(rounds, generator=torch.Generator().manual_seed(0)).tolist()
    assert timing.interval(seconds) == (k - 1, rounds - k)

    def coverage(k):
        return 1 - 2 * sum(math.comb(rounds, i) for i in range(k)) / 2**rounds

    assert coverage(k + 1) < 0.95 and (coverage(k) >= 0.95 or rounds < 6)
    assert rounds != 10 or coverage(k) == pytest.approx(0.979, abs=5e-4)


def test_an_interval_covers_the_median_as_often_as_it_says():
    drawn = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0)).exp().tolist()
    hits = sum(low <= 1 <= high for low, high in map(timing.interval, drawn))
    assert hits / 2000 == pytest.approx(0.979, abs=0.01)


def test_the_interval_is_in_the_figures(tmp_path, cli):
    done = made()
    figures = bench.row(done, done.results[0])
    assert (figures["low_ms"], figures["high_ms"]) == pytest.approx((1.001, 1.008))
    assert figures["margin"] == pytest.approx(0.0035 / 1.0045)
    report.save(done, tmp_path / "run.json")
    shown = cli("bench", "--load", "run.json")
    (first, *_) = table = rows(shown)
    assert list(first)[3:6] == ["ms", "IQR, ms", "± %"] and {row["± %"] for row in table} == {"0.3"}
    assert shown.stderr == ""


@pytest.mark.parametrize(
    "loose, named",
    [(1, "part0 threads=1"), (5, "part0 threads=2, sdpa threads=1, part4 Br=32 threads=1, ...")],
)
def test_medians_that_are_not_firm_are_named(tmp_path, cli, loose, named):
    """The least firm first."""
    done = made(lengths=(64,), br=(16, 32))
    for i, result in enumerate(done.results[:loose]):
        result.seconds[:3] = [1e-3 * (0.89 - 0.05 * i)] * 3
    report.save(done, tmp_path / "run.json")
    assert cli("bench", "--load", "run.json").stderr == (
        f"Not firm: in {loose} of 8 cells the median's interval is wider than 2.5 % either way ({named}).\n"
    )


@pytest.mark.parametrize(
    "calls, rounds",
    [
        (4 + 4 + 3, [1, 1]),  # in the second round
        (12 + 3, [2, 2]),  # while the second group is verified
        (24 + 4 + 3, [3, 3, 2, 2]),  # in a round of the second pass
        (24 + 8 + 1, [4, 4, 2, 2]),  # before the second group's
    ],
)
def test_ctrl_c_keeps_what_was_measured(run, monkeypatch, tmp_path, calls, rounds):
    """Two calls of a cell verify it, two are a round, of which each pass has two."""
    right, counted = bench.attention, itertools.count(1)

    def interrupted(*arguments, **options):
        if next(counted) == calls:
            raise KeyboardInterrupt
        return right(*arguments, **options)

    monkeypatch.setattr(bench, "attention", interrupted)
    done = run("part3,part4", "-N", "64,128", "-d", "16", "--min-time", "0", "--save", "run.json")
    assert done.returncode == 130
    assert "Stopped before the end." in done.stdout and "| part3 |" in done.stdout
    assert "Traceback" not in done.stderr
    kept = report.load(tmp_path / "run.json")
    assert not kept.complete and [len(result.seconds) for result in kept.results][: len(rounds)] == rounds
    assert not any(result.seconds for result in kept.results[len(rounds) :])


def test_the_bar_ends_where_the_run_does(steady, monkeypatch):
    totals, steps = [], []

    @contextlib.contextmanager
    def progress(total, doing):
        totals.append(total)
        yield lambda amount, what: steps.append(amount)

    monkeypatch.setattr(sweep, "progress", progress)
    sweep.measure(bench.plan(["part3", "sdpa"], lengths=(32, 64)), 7, 0)
    assert sum(steps) == pytest.approx(totals[0])


def test_the_preset_is_bench(tmp_path):
    """benchmarks/attention.py hands its arguments on; of an option that is given twice the last counts."""
    script = ROOT / "benchmarks" / "attention.py"
    command = [sys.executable, str(script)]
    given = [*command, "part4,sdpa", "-N", "64", "--dry-run"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 cells, 15 rounds each\n")
    everything = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, cwd=tmp_path)
    assert all(f"\n{name}, " in everything.stdout for name in [*PARTS, "sdpa"])
