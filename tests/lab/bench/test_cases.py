"""The cells of a sweep, and its contenders."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from support import naming

from shakespeare.attention_ext import PARTS, tiles
from shakespeare.lab.bench.cases import plan
from shakespeare.lab.explain import explain


def test_a_plan_is_every_contender_at_every_case(extension):
    sizes = dict(lengths=(8, 16), widths=(4,), masks=(False, True), threads=(1, 2))
    cells = plan(["part0", "part4", "sdpa"], **sizes, br=(2, None), bc=(3,))
    assert len(cells) == 2 * 2 * 2 * (1 + 2 + 1)
    assert len({cell.group for cell in cells}) == 8
    each = itertools.product((1, 2), (8, 16), (False, True))
    chosen = {tiles.tile("portable", threads, 4, N, causal, 4 * N)[0] for threads, N, causal in each}
    assert tiles.DEFAULT[0] in chosen
    assert {(cell.br, cell.bc) for cell in cells} == {(None, None), (2, 3), *((br, 3) for br in chosen)}
    assert {cell.simd for cell in cells if cell.contender != "part4"} == {None}


def test_a_wrong_plan():
    for arguments, message in (
        (dict(names=["part7"]), "contender is 'part7'; it must be one of part0,"),
        (dict(names=["part0", "part0"]), "contender is 'part0,part0'; it must name one or more, each once"),
        (dict(names=["part1"], simds=["sse"]), "simd is 'sse'; it must be one of auto,"),
        (dict(names=["part1"], queries=5, masks=[True]), "queries is 5; with a causal mask it must be 1 or"),
    ):
        with naming(arguments), pytest.raises(ValueError, match=message):
            plan(**arguments)


@pytest.mark.full
def test_a_part_without_a_count_takes_part_everywhere(cli, steady, monkeypatch, tmp_path):
    """A new part has a row in PARTS and none in the table of traffic counts."""
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(PARTS, "part5", dataclasses.replace(PARTS["part4"], name="part5"))
    small = ["-N", "64,128", "-d", "16", "-r", "2", "--min-time", "0"]
    done = cli("bench", "part4,part5,sdpa", *small, "--save", "run.json", "--plot", "pictures")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pictures" / "roofline.svg").exists()
    rows = json.loads(cli("bench", "--load", "run.json", "-o", "json").stdout)["rows"]
    for row in rows:
        assert row["ms"] and row["scratch"] and (row["gbps"] is None) == (row["contender"] != "part4")
    lines = []
    explain(plan(["part5"], lengths=[64])[0], lines.append)
    explained = "\n".join(lines)
    assert "moved       not counted for part5\n" in explained and "bound by    the FMA peak" in explained
