"""Comparing two runs: real differences are reported, and chance is not."""

import pytest
import torch
from support import bench_run

from shakespeare.lab.bench import compare, report

pytest.importorskip("scipy")


@pytest.mark.parametrize("change, code, word", [(1.2, 1, "+20.0 % slower"), (0.8, 0, "-20.0 % faster")])
def test_a_real_difference_is_reported(tmp_path, cli, change, code, word):
    report.save(bench_run(), tmp_path / "old.json")
    report.save(bench_run(change), tmp_path / "new.json")
    done = cli("bench", "--load", "new.json", "--compare", "old.json", "--fail-on-regression", code=code)
    assert done.stdout.count(word) == 4 and "4 of 12 cells differ" in done.stdout
    cli("bench", "--load", "new.json", "--compare", "old.json")
    done = cli("bench", "--load", "new.json", "--compare", "old.json", "--threshold", 30)
    assert "\nNo difference above 30 %" in done.stdout


def test_chance_is_not_reported():
    """Times of one wide distribution: medians differ by more than 5 % by chance alone."""
    before, now = bench_run(), bench_run()
    generator = torch.Generator().manual_seed(0)
    for run_ in (before, now):
        for result in run_.results:
            result.seconds = (1e-3 * (1 + torch.rand(10, generator=generator))).tolist()
    medians = [abs(a.median / b.median - 1) for a, b in zip(before.results, now.results)]
    assert max(medians) > compare.THRESHOLD
    compared = compare.compare(before, now)
    assert (compared.cells, compared.differences, compared.worse) == (12, [], False)


def test_one_slow_cell_of_many_is_found():
    """With as many cells and rounds as a whole sweep has."""
    lengths = range(1, 28)
    before, now = bench_run(lengths=lengths), bench_run(lengths=lengths)
    assert len(now.results) == 162
    compare.check(before, [result.cell for result in now.results], 10)
    now.results[70].seconds = [2 * s for s in now.results[70].seconds]
    (found,) = compare.compare(before, now).differences
    assert found.cell == now.results[70].cell and found.change == pytest.approx(1.0)


def test_what_is_wrong_now_is_worse(tmp_path, cli):
    report.save(bench_run(), tmp_path / "old.json")
    now = bench_run()
    now.results[1].status, now.results[1].note = "wrong", "at (0, 0, 0, 0): ..."
    now.results[1].seconds, now.results[1].paces = [], []
    report.save(now, tmp_path / "new.json")
    done = cli("bench", "--load", "new.json", "--compare", "old.json", "--fail-on-regression", code=1)
    assert "Right before, wrong now: part4, SIMD auto, N 64" in done.stdout
