"""The lab on WebGPU: a part's test, bench, explain's counts. Without an adapter they skip with a reason."""

import pytest

from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.webgpu.steps import STEPS, Tile
from shakespeare.lab import correctness
from shakespeare.lab.bench import cases, report
from shakespeare.lab.bench.cuda import GpuBench
from shakespeare.lab.webgpu.explain import count, explain

pytestmark = pytest.mark.usefixtures("adapter")


def cell(**changes) -> cases.Cell:
    sizes = dict(N=24, queries=24, d=8, batch=1, heads=2, causal=False)
    return cases.Cell("part4", None, br=None, bc=None, threads=1, device="webgpu", **sizes | changes)


@pytest.mark.parametrize("kernel, dtype", [("1", Dtype.FP32), ("2", Dtype.FP16), ("6", Dtype.FP32)])
def test_the_test_of_a_part(adapter, kernel, dtype):
    if "shader-f16" not in adapter.features and (kernel, dtype) != ("1", Dtype.FP32):
        pytest.skip(f"{adapter.name} lacks shader-f16")
    said: list[str] = []
    call = dict(causal=True, echo=said.append, device="webgpu")
    assert correctness.run("part4", 24, dtype=dtype, d=8, kernel=kernel, **call)
    assert f"step {kernel}: {STEPS[kernel].summary}" in said[0] and adapter.name in said[0]
    with pytest.raises(ValueError, match="d is 257; it must be at most 256 on WebGPU"):
        correctness.run("part4", 24, d=257, **call)


def test_bench_checks_and_times_each_step(monkeypatch, tmp_path):
    from shakespeare.lab.webgpu import gpu

    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.001)
    names = ("webgpu1", "webgpu2", "part4")
    cells = cases.plan(names, lengths=(24,), widths=(8,), heads=2, device="webgpu")
    bench = GpuBench(cells, 2, 0.01, gpu=gpu.Gpu())
    list(bench.run())
    found = [(each.cell.contender, each.status, len(each.seconds)) for each in bench.done.results]
    assert found == [(name, "ok", 2) for name in names]
    report.save(bench.done, tmp_path / "run.json")
    assert report.text(report.load(tmp_path / "run.json"), "md") == report.text(bench.done, "md")


def test_explain_has_a_row_for_a_step(adapter, monkeypatch):
    monkeypatch.setattr("shakespeare.lab.webgpu.gpu.LEAST_SECONDS", 0.001)
    said: list[str] = []
    explain(cell(), said.append, "2")
    text = "\n".join(said)
    assert f"{adapter.name}, {adapter.backend}" in text and "limits, measured: " in text
    assert "| 2 | 16 x 16, 256 threads |" in text


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_the_counts_are_those_of_the_loops(name, causal):
    """Of a GPU that reads a number for one lane at a time: multiply-adds, exponentials and fours, counted."""
    step, one = STEPS[name], cell(N=40, queries=40, causal=causal)
    tile = Tile(8, 4) if name in "12" else Tile(2, 4, 3, 4) if name == "3" else Tile(2, 4, 4, 8)
    d4, half = 2, 8 if name == "6" else 16
    width = -(-d4 // tile.lanes)
    adds = exponentials = workgroup = storage = 0
    for first in range(0, 40, tile.br):
        storage += 0 if name == "1" else tile.br * d4 * 16
        workgroup += 0 if name == "1" else tile.br * d4 * 16  # Q
        for _ in range(0, min(40, first + tile.br) if causal else 40, tile.bc):
            for _ in range(tile.threads):
                if name in "12":
                    adds += 4 * d4 + 4 * tile.bc * width
                    exponentials += 1 + tile.bc
                    workgroup += 4 + 8 * tile.bc
                    reads = 2 * d4 + tile.bc * width
                    storage += 16 * reads if name == "1" else 0
                    workgroup += 16 * reads if name == "2" else 0
                else:
                    scores = tile.rows * tile.keys
                    adds += 4 * scores * d4 + 4 * tile.rows * tile.bc * width
                    exponentials += scores + 4
                    workgroup += 16 * (1 + tile.lanes)  # the maxima: no subgroup has a whole row
                    workgroup += tile.bc * width * half
                    if name == "3":
                        workgroup += 16 * d4 * (4 + tile.rows) + 16 * tile.rows * (1 + tile.lanes)
                    else:  # rows and keys by columns, in fours
                        workgroup += 4 * d4 * (16 + 2 * half) + half * (tile.keys + tile.bc)
            if name != "1":
                storage += 16 * 2 * tile.bc * d4
                workgroup += 2 * tile.bc * d4 * half
    found = count(step, tile, one, 1)
    stored = 40 * (d4 * 16 + 4)
    assert (found.multiply_adds, found.exponentials) == (2 * adds, 2 * exponentials)
    assert (found.workgroup, found.storage) == (2 * workgroup, 2 * (storage + stored))
    assert count(step, tile, one, 32).workgroup < found.workgroup
