"""The lab on WebGPU: a part's test, bench, explain's counts. Without an adapter they skip with a reason."""

import pytest
from support import cell as of_sizes

from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.webgpu.steps import STEPS, Tile
from shakespeare.lab import correctness
from shakespeare.lab.bench import plan, report
from shakespeare.lab.bench.gpu_bench import GpuBench
from shakespeare.lab.bench.sweep import Sweep
from shakespeare.lab.explain import explain
from shakespeare.lab.webgpu.traffic import step_counts

pytestmark = pytest.mark.usefixtures("adapter")


def cell(**changes) -> plan.Cell:
    return of_sizes("part4", device="webgpu", **{"N": 24, "d": 8, "heads": 2} | changes)


@pytest.mark.parametrize("kernel, dtype", [("1", Dtype.FP32), ("2", Dtype.FP16), ("6", Dtype.FP32)])
def test_the_test_of_a_part(adapter, kernel, dtype):
    if "shader-f16" not in adapter.features and (kernel, dtype) != ("1", Dtype.FP32):
        pytest.skip(f"{adapter.name} lacks shader-f16")
    said: list[str] = []
    assert correctness.run(cell(dtype=dtype, causal=True), said.append, kernel)
    assert f"step {kernel}: {STEPS[kernel].summary}" in said[0] and adapter.name in said[0]
    with pytest.raises(ValueError, match="d is 257; it must be at most 256 on WebGPU"):
        correctness.run(cell(d=257), said.append)


def test_bench_checks_and_times_each_step(monkeypatch, tmp_path):
    from shakespeare.lab.webgpu import device

    monkeypatch.setattr(device, "MIN_SECONDS", 0.001)
    names = ("webgpu1", "webgpu2", "part4")
    cells = plan.plan(names, Sweep(lengths=(24,), widths=(8,), heads=2, device="webgpu"))
    bench = GpuBench(cells, 2, 0.01, gpu=device.Gpu())
    list(bench.run())
    found = [(each.cell.contender, each.status, len(each.seconds)) for each in bench.done.results]
    assert found == [(name, "ok", 2) for name in names]
    report.save(bench.done, tmp_path / "run.json")
    assert report.text(report.load(tmp_path / "run.json"), "md") == report.text(bench.done, "md")


def test_explain_has_a_row_for_a_step(adapter, monkeypatch):
    monkeypatch.setattr("shakespeare.lab.webgpu.device.MIN_SECONDS", 0.001)
    said: list[str] = []
    explain(cell(), said.append, kernel="2")
    text = "\n".join(said)
    assert f"{adapter.name}, {adapter.backend}" in text and "limits, measured: " in text
    assert "| 2 | 16 x 16, 256 threads |" in text


@pytest.mark.parametrize("causal", [False, True])
def test_every_step_counts_at_least_what_it_must(causal):
    pairs, tile = 2 * (40 * 41 / 2 if causal else 40 * 40), Tile(2, 4, 4, 8)
    tiles = {"1": Tile(8, 4), "2": Tile(8, 4), "3": Tile(2, 4, 3, 4)}
    for name, step in STEPS.items():
        found = step_counts(step, tiles.get(name, tile), cell(N=40, causal=causal), 1)
        assert found["multiply-adds"] >= 2 * 8 * pairs and found["exp2"] >= pairs, name
        assert found["workgroup memory"] > 0 and found["storage"] >= 2 * 4 * 40 * 8 * 4, name
