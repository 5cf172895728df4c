"""The benchmark of attention: it verifies before it times, and says when its figures are not firm."""

from __future__ import annotations

import importlib.util
import re

import pytest
from click.testing import CliRunner
from conftest import ROOT

spec = importlib.util.spec_from_file_location("bench_attention", ROOT / "benchmarks" / "attention.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
SMALL = ["-N", "64", "-d", "16", "--rounds", "2", "--parts", "part0,part4"]


@pytest.fixture
def run(quiet):
    """Run the benchmark on a quiet, steady machine."""
    quiet(bench)
    return lambda *arguments: CliRunner().invoke(bench.main, [*SMALL, *arguments])


def test_a_table_for_each_case(run):
    done = run()
    assert done.exit_code == 0, done.output
    assert "N=64, d=16, 64 queries, no mask" in done.output and "64 queries, causal" in done.output
    for name in ("SDPA", "part0", "part4"):
        pattern = rf"^\| {name} \| ([\d.]+) \| \d+ % \| (\d+) \| (\d+) % \| [\d.]+ \|"
        rows = re.findall(pattern, done.output, re.M)
        assert len(rows) == 2
        for milliseconds, gflops, share in rows:
            assert float(share) == pytest.approx(float(gflops), abs=1)  # the peak is 100 GFLOP/s
    assert all(row.split("|")[6].strip() == "1.00" for row in done.output.splitlines() if "| SDPA |" in row)


def test_what_is_wrong_is_not_timed(run, monkeypatch):
    right = bench.attention

    def wrong(part, *tensors, **options):
        return right("part0", *tensors, causal=options["causal"]) + (part == "part4") * 0.01

    monkeypatch.setattr(bench, "attention", wrong)
    assert len(re.findall(r"^\| part4 \| wrong, so not timed .* 1e-02 \|$", run().output, re.M)) == 2


def test_a_busy_machine_is_named(run, monkeypatch):
    monkeypatch.setattr(bench.Load, "others", staticmethod(lambda: 0.7))
    done = run()
    assert done.exit_code == 3
    assert "The machine was busy: others took 0.70 processors" in done.output


def test_the_load_of_others_is_what_this_process_did_not_use(monkeypatch):
    """Processor seconds of the machine, of this process, wall seconds: 5 - 2 by others in 4."""
    readings = iter([(100.0, 10.0, 1000.0), (105.0, 12.0, 1004.0)])
    monkeypatch.setattr(bench.Load, "_now", staticmethod(lambda: next(readings)))
    assert bench.Load().others() == pytest.approx(0.75)
    monkeypatch.setattr(bench.Load, "_now", staticmethod(lambda: None))
    assert bench.Load().others() is None


def test_the_peak_is_plausible(extension):
    peak = bench.build.load("portable").fma_peak(0.02)
    assert 1e9 < peak < 1e12


@pytest.mark.parametrize("arguments", [["-d", "x"], ["-N", "0"], ["--parts", "part7"], ["--simd", "sse"]])
def test_wrong_arguments(run, arguments):
    assert run(*arguments).exit_code == 2
