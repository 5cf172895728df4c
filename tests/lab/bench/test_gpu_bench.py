"""The sweep on a GPU: its plan, what it measures and reports, by a GPU that is made up."""

import sys
import types
from unittest.mock import Mock

import pytest
import torch
from support import FakeGpu, gpu_run

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.rules import NAMES
from shakespeare.lab.bench import contenders, gpu_bench, report
from shakespeare.lab.bench.plan import plan
from shakespeare.lab.bench.sweep import Sweep

CASE = dict(lengths=(64,), widths=(16,), heads=2, device="cuda")


def on_cpu(monkeypatch):
    def pretend(part, *qkv, causal=False, **options):
        rules = {name: value for name, value in options.items() if name in NAMES}
        return attention("part0", *qkv, causal=causal, **rules)

    monkeypatch.setattr(contenders, "attention", pretend)


def measured(names, rounds=3, gpu=None, **case):
    bench = gpu_bench.GpuBench(plan(names, Sweep(**CASE | case)), rounds, 0.01, gpu=gpu or FakeGpu())
    assert all(bench.run())
    return bench.done


def test_a_run_verifies_times_and_skips(monkeypatch):
    on_cpu(monkeypatch)
    done = measured(["part0", "kernel1", "sdpa-math", "sdpa-cudnn"])
    assert done.complete and done.busy is None
    assert [r.cell.contender for r in done.results] == ["part0", "kernel1", "sdpa-math", "sdpa-cudnn"] * 2
    for result in done.results:
        if result.cell.contender == "sdpa-cudnn":  # refuses tensors on a CPU
            assert result.status == "skipped" and result.note and "\n" not in result.note
            assert not result.seconds
        else:
            assert result.status == "ok" and result.error < 1e-6 and len(result.seconds) == 3
            assert set(result.seconds) == {2e-3 if result.cell.l2 == "cold" else 1e-3}
            assert result.scratch == 1000 and result.paces == [1.0] * 3
    rows = [report.row(done, result) for result in done.results]
    assert rows[1]["peak_share"] == pytest.approx(4 * 2 * 64 * 64 * 16 / 1e-3 / 5e13)
    assert rows[1]["over_sdpa"] == 1.0 and rows[1]["tflops"] == pytest.approx(rows[1]["gflops"] / 1000)


def test_gradients_are_verified_and_timed(monkeypatch):
    def pretend(part, q, k, v, causal, kernel, **_):
        if kernel == "backward2":  # dq is 2 % too large
            q = 1.02 * q - 0.02 * q.detach()
        return attention("part0", q, k, v, causal=causal)

    monkeypatch.setattr(contenders, "attention", pretend)
    names = ["part0", "backward1", "backward2", "sdpa-math"]
    done = measured(names, backward=True, masks=[True], l2s=["warm"])
    assert {r.cell.contender for r in done.results if r.status == "wrong"} == {"backward2"}
    first = report.row(done, done.results[1])
    assert first["status"] == "ok" and first["error"] < 1e-5
    assert first["peak_share"] == pytest.approx(2.5 * 4 * 2 * (64 * 65 // 2) * 16 / 1e-3 / 5e13)
    assert ", pass backward" in report.text(done, "md")


def test_rules_and_flash_attn(monkeypatch):
    """Its packages are made up; version 4 gives a pair."""

    def flash_attn_func(
        q, k, v, causal, window_size=None, softcap=None, alibi_slopes=None, deterministic=False
    ):
        ordered.append(deterministic)
        rules = dict(window=window_size, softcap=softcap, alibi_slopes=alibi_slopes)
        by_head = (t.transpose(1, 2) for t in (q, k, v))
        return attention("part0", *by_head, causal=causal, **rules).transpose(1, 2)

    def flash_attn_4_func(*tensors, **options):
        arguments.append(sys.argv)
        return flash_attn_func(*tensors, **options), None

    arguments = []
    ordered = []
    monkeypatch.setattr(sys, "argv", ["gpt.py", "-d", "8"])  # which version 4's compiler would parse

    on_cpu(monkeypatch)
    names = [
        "kernel6",
        "sdpa-math",
        *(name for name in contenders.FLASH_ATTN if name != contenders.DETERMINISTIC),
    ]
    rules = ("window=5+softcap=3", "alibi")
    case = dict(names=names, masks=(True,), rules=rules, dtype="bf16", l2s=("cold",))
    assert {r.status for r in measured(**case).results if "flash-attn" in r.cell.contender} == {"skipped"}
    modules = {module: flash_attn_func for _, module, _ in contenders.FLASH_ATTN.values()}
    for module, function in (modules | {"flash_attn.cute": flash_attn_4_func}).items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(flash_attn_func=function))
    found = {(r.cell.contender, r.cell.rules): (r.status, r.note) for r in measured(**case).results}
    for (name, rule), (status, note) in found.items():
        lacks = name == "sdpa-math" or (name, rule) in (("flash-attn-3", "alibi"), ("flash-attn-4", "alibi"))
        assert status == ("skipped" if lacks else "ok"), (name, rule, note)
    assert found["flash-attn-4", "alibi"][1] == "contender 'flash-attn-4' has no alibi_slopes"
    assert arguments[0] == ["gpt.py"] and sys.argv == ["gpt.py", "-d", "8"]
    assert not any(ordered)
    done = measured(**case | {"names": [contenders.DETERMINISTIC], "rules": rules[:1], "backward": True})
    assert [r.status for r in done.results] == ["ok"] and ordered[-1]


def test_what_does_not_fit_is_skipped_and_inputs_that_do_not_are_refused(monkeypatch):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")
    monkeypatch.setattr(contenders, "attention", Mock(side_effect=full))
    done = measured(["part0"], gpu=FakeGpu(free=10**6))
    assert {r.note for r in done.results} == {"needs more memory than the GPU has free"}
    with pytest.raises(ValueError, match="N=64, queries=64, d=16, heads=2, batch=1 need 96 KiB, and 1000 B"):
        gpu_bench.GpuBench(plan(["part0"], Sweep(**CASE)), 2, 0.01, gpu=FakeGpu(free=1000))


def test_bytes_are_counted_where_they_bound(monkeypatch):
    on_cpu(monkeypatch)
    done = measured(["kernel1"], lengths=(4096,), queries=1, dtype="bf16")
    assert {r.traffic for r in done.results} == {2 * 16 * (2 + 2 * 4096) * 2}
    assert done.tensor_peaks == {"bf16": 4e14} and done.peak(done.results[0].cell) == 4e14
    text = report.text(done, "md")
    rows = {result.cell.l2: report.row(done, result) for result in done.results}
    assert rows["cold"]["reading_share"] == 1e-3 / 2e-3 and rows["warm"]["reading_share"] == 5e-4 / 1e-3
    assert "| GB/s | of bandwidth | of reading |" in text
    assert "400 TFLOP/s in bf16 by PyTorch's product" in text
    assert {r.traffic for r in measured(["kernel1"], lengths=(512,)).results} == {None}


def test_the_ladder(tmp_path, cli):
    plots = pytest.importorskip("shakespeare.lab.bench.plots", exc_type=ValueError)
    done = gpu_run()
    figure = plots.ladder(done)
    (axes,) = figure.axes
    kernels = [r.cell.contender for r in done.results if r.cell.contender.startswith("kernel")]
    speeds = dict(zip(reversed(kernels), (bar.get_width() for bar in axes.patches)))
    # Kernel 1 takes 1 ms, kernel 3 a third of it, and sequential C++ 2 s for 2 of 100 heads.
    assert speeds["kernel1"] == pytest.approx(100 / 1.0045e-3)
    assert speeds["kernel3"] == pytest.approx(3 * speeds["kernel1"])
    assert "2 heads): 2 s; scaled by work" in figure.get_suptitle()
    report.save(done, tmp_path / "run.json")
    shown = cli("bench", "--load", "run.json", "--plot", "pictures").stdout
    assert "| over kernel before | over C++" in shown and "2 heads): 2 s; scaled" in shown
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {"ladder.svg", "ladder.png"}


def test_the_command_measures_on_the_gpu(monkeypatch, cli):
    on_cpu(monkeypatch)
    monkeypatch.setattr(gpu_bench, "Gpu", FakeGpu)
    small = ["-N", 64, "-d", 16, "--batch", 2, "-r", 2, "--min-time", 0]
    done = cli("bench", "part0,kernel2,sdpa-math", "--device", "cuda", *small, "--save", "run.json")
    assert "Fake GPU, compute capability 9.0, 132 multiprocessors" in done.stdout
    assert "N 64, d 16, batch 2, heads 1, mask none, device cuda\n" in done.stdout
    assert done.stdout.count("| kernel2 | ") == 2
    again = cli("bench", "kernel2", "--device", "cuda", *small, "--l2", "cold", "--save", "run.json")
    assert again.stdout.count("| kernel2 | ") == 1
