"""The output formats of a run, and the file that keeps it."""

import csv
import io
import json
from unittest.mock import Mock

import pytest
import torch
from support import bench_run, records

from shakespeare.attention_ext import processor
from shakespeare.lab.bench import contenders, report

SMALL = ["-N", "64", "-d", "16", "-r", "2", "--min-time", "0"]


def test_slowed_rounds_are_left_out(tmp_path, cli):
    """Three of ten rounds are slowed, then five. One of the five still counts: six rounds must remain."""
    done = bench_run(lengths=(64,), threads=(1,))
    for result, slowed in zip(done.results, (0, 3, 5)):
        result.seconds[:slowed] = [1e-3 * (2 + i) for i in range(slowed)]
        result.every = [2e-3] * 10
        result.paces[:slowed] = [0.9 + 0.01 * i for i in range(slowed)]
    report.save(done, tmp_path / "run.json")
    assert report.load(tmp_path / "run.json") == done
    table = records(cli("bench", "--load", "run.json"))
    assert [row["quiet"] for row in table] == ["10 of 10", "7 of 10", "5 of 10"]
    assert [float(row["all, ms"]) for row in table] == pytest.approx([2.0, 2.0, 2.0])
    assert [result.median for result in done.results] == pytest.approx([1.0045e-3, 1.006e-3, 1.0075e-3])
    assert max(done.results[2].counted) == 6e-3 and len(done.results[2].seconds) == 10
    report.save(bench_run(), tmp_path / "run.json")
    assert "all, ms" not in records(cli("bench", "--load", "run.json"))[0]  # as in files of older versions


def test_every_form_holds_the_same_figures(run, tmp_path):
    run("part0,part4", *SMALL, "--save", "run.json")
    whole = json.loads(run("--load", "run.json", "-o", "json").stdout)
    assert [result["cell"]["contender"] for result in whole["results"]] == ["part0", "part4"]
    lines = run("--load", "run.json", "-o", "jsonl").stdout.splitlines()
    table = list(csv.DictReader(io.StringIO(run("--load", "run.json", "-o", "csv").stdout)))
    for row, line, record in zip(whole["rows"], map(json.loads, lines), table, strict=True):
        assert row.items() <= line.items() and line["torch"] == torch.__version__
        assert float(record["ms"]) == row["ms"] and record["contender"] == row["contender"]
    assert len(records(run("--load", "run.json"))) == 2


def test_another_file_is_refused(tmp_path, failed):
    file = tmp_path / "run.json"
    report.save(bench_run(), file)
    right = file.read_text()
    wrong = ["", "[]", "{}", "[" * 100_000, '{"format": 99}', '{"format": 3, "results": [1]}']
    for old, new in (
        ('"heads"', '"hands"'),
        ('"seconds": [', '"seconds": [-1,'),
        ("1.0]", "1.5]"),
        ('"paces": [', '"paces": [1.0,'),
        ('"traffic": 1000.0', '"traffic": -1'),
        ('"device": "cpu"', '"device": "tpu"'),
        ('"rules": null', '"rules": 5'),
        ('"rules": null', '"rules": "windows=3"'),
        ('"note": null', '"note": "\\u001b[2J"'),
        ('"busy": null', '"busy": "a\\rb"'),
        ('"cpu": "', '"cpu": "\\u009b'),
    ):
        assert old in right
        wrong.append(right.replace(old, new))
    for content in wrong:
        file.write_text(content)
        assert "run.json is not a run that bench saved" in failed("bench", "--load", file), content[:80]


def test_a_run_is_kept_in_files_alone(tmp_path, failed, run, monkeypatch):
    for place, said in ((tmp_path, "is a directory"), ("/dev/null", "'/dev/null'; it must be a file")):
        assert said in failed("bench", "sdpa", "-N", "8", "--save", place)
    report.save(bench_run(), tmp_path / "run.json")
    kept = (tmp_path / "run.json").read_text()
    monkeypatch.setattr(contenders, "attention", Mock(side_effect=KeyboardInterrupt))
    run("part4", *SMALL, "--save", "run.json", code=130)
    assert (tmp_path / "run.json").read_text() == kept


def test_save_alone_keeps_the_run_by_processor(results, run, cli):
    run("part0,sdpa", *SMALL, "--save")
    (file,) = results.iterdir()
    assert file.name == f"bench-{processor.slug()}.json"
    machine = json.loads(file.read_text())["machine"]
    assert machine["microarchitecture"] == processor.microarchitecture() and machine["compiler"]
    assert "| sdpa |" in cli("bench", "--load", file).stdout
    assert [*results.iterdir()] == [file]


def test_medians_that_are_not_firm_are_named(tmp_path, cli):
    """The least firm one comes first."""
    done = bench_run(lengths=(64,), br=(16, 32))
    for i, result in enumerate(done.results[:5]):
        result.seconds[:3] = [1e-3 * (0.89 - 0.05 * i)] * 3
    report.save(done, tmp_path / "run.json")
    assert cli("bench", "--load", "run.json").stderr == (
        "Not firm: in 5 of 8 cells the median's interval is wider than 2.5 % either way "
        "(part0 threads=2, sdpa threads=1, part4 Br=32 threads=1, ...).\n"
    )
