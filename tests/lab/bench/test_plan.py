"""The cells of a sweep, and its contenders."""

import itertools

import pytest
from support import naming

from shakespeare.attention_ext import default_tile
from shakespeare.lab.bench.plan import plan
from shakespeare.lab.bench.sweep import Sweep


def test_a_plan_is_every_contender_at_every_case(extension):
    sizes = dict(lengths=(8, 16), widths=(4,), masks=(False, True), threads=(1, 2))
    cells = plan(["part0", "part4", "sdpa"], Sweep(**sizes, br=(2, None), bc=(3,)))
    assert len(cells) == 2 * 2 * 2 * (1 + 2 + 1)
    assert len({cell.group for cell in cells}) == 8
    each = itertools.product((1, 2), (8, 16), (False, True))
    chosen = {default_tile.tile("portable", threads, 4, N, causal, 4 * N)[0] for threads, N, causal in each}
    assert default_tile.DEFAULT[0] in chosen
    assert {(cell.br, cell.bc) for cell in cells} == {(None, None), (2, 3), *((br, 3) for br in chosen)}
    assert {cell.simd for cell in cells if cell.contender != "part4"} == {None}


def test_a_plan_with_as_many_tokens_and_columns_at_every_size():
    cells = plan(["part0"], Sweep(lengths=(8, 24), widths=(4, 16), tokens=64, columns=32))
    assert {(cell.N, cell.d, cell.batch, cell.heads) for cell in cells} == {
        *((8, 4, 8, 8), (8, 16, 8, 2), (24, 4, 2, 8), (24, 16, 2, 2))
    }


def test_a_wrong_plan():
    for arguments, message in (
        (dict(names=["part7"]), "contender is 'part7'; it must be one of part0,"),
        (dict(names=["part0", "part0"]), "contender is 'part0,part0'; it must name one or more, each once"),
        (dict(names=["part1"], simds=["sse"]), "simd is 'sse'; it must be one of auto,"),
        (dict(names=["part1"], queries=5, masks=[True]), "queries is 5; with a causal mask it must be 1 or"),
        (dict(names=["kernel1"]), "contender is 'kernel1'; it must be one of part0,"),
        (dict(names=["part0"], device="tpu"), "device is 'tpu'; it must be one of cpu, cuda"),
        (dict(names=["part1"], device="cuda"), "contender is 'part1'; on CUDA it must be one of part0"),
        (dict(names=["part0"], tokens=63, lengths=[32, 64]), "tokens is 63; it must be at least N=64"),
        (dict(names=["part0"], columns=31), "columns is 31; it must be at least d=32"),
        (dict(names=["part0"], backward=True, queries=5), "backward is True; it must be False with"),
        (dict(names=["kernel1"], device="cuda", backward=True), "is 'kernel1'; with backward on CUDA it"),
        (dict(names=["kernel1"], device="cuda", l2s=["hot"]), "l2 is 'hot'; on CUDA it must be one of warm,"),
    ):
        with naming(arguments), pytest.raises(ValueError, match=message):
            plan(arguments.pop("names"), Sweep(**arguments))
