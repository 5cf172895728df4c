"""The sweep on a GPU: its plan, what it measures and reports, by a GPU that is made up."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from support import FakeGpu, gpu_run

from attention_ext import attention
from attention_ext.cuda.steps import STEPS
from lab.bench import cases, compare, contenders, cuda, measure, report, sequential, sweep
from lab.bench.cases import Cell, plan

CASE = dict(lengths=(64,), widths=(16,), heads=2, device="cuda")


def on_cpu(monkeypatch):
    """Let part0 compute the steps."""

    def pretend(part, q, k, v, *, causal=False, step=None, **options):
        return attention("part0", q, k, v, causal=causal)

    monkeypatch.setattr(contenders, "attention", pretend)


def measured(names, rounds=3, gpu=None, **case):
    bench = cuda.GpuBench(plan(names, **CASE | case), rounds, 0.01, gpu=gpu or FakeGpu())
    assert all(bench.run())
    return bench.done


def test_a_plan_is_every_contender_with_a_warm_and_a_cold_cache():
    cells = plan(["part4", "step1", "sdpa-math"], widths=(16, 32), device="cuda", dtype="bf16")
    assert [(c.contender, c.d, c.l2) for c in cells[:6]] == [
        (name, 16, l2) for l2 in ("warm", "cold") for name in ("part4", "step1", "sdpa-math")
    ]
    assert len(cells) == 12 and len({cell.group for cell in cells}) == 4
    assert {(c.simd, c.br, c.bc, c.threads, c.device) for c in cells} == {(None, None, None, 1, "cuda")}
    assert {c.l2 for c in plan(["step1"], device="cuda", l2s=["cold"])} == {"cold"}
    assert {cell.l2 for cell in plan(["part0"])} == {None}
    assert not any(cell.causal for cell in plan(["step1"], queries=1, masks=[True], device="cuda"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(names=["part1"]), "contender is 'part1'; on CUDA it must be one of part0, part4, step1,"),
        (dict(names=["onnx"]), "contender is 'onnx'; on CUDA it must be one of"),
        (dict(names=["numba-spilled"], dtype="bf16"), "contender 'numba-spilled' takes fp32 only"),
        (dict(names=["part0"], device="tpu"), "device is 'tpu'; it must be one of cpu, cuda"),
        (dict(names=["step1"], l2s=["hot"]), "l2 is 'hot'; on CUDA it must be one of warm, cold"),
        (dict(names=["step1"], queries=3, masks=[True]), "queries is 3; with a causal mask it must be 1 or"),
        (dict(names=["step1"], device="cpu"), "contender is 'step1'; it must be one of part0,"),
    ],
)
def test_a_wrong_plan(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"device": "cuda"} | arguments)


def test_the_default_contenders():
    names = cases.default_names("fp32", "cuda")
    assert names[0] == "part0" and "part4" not in names and "sdpa" not in names
    takes = [f"step{name}" for name, step in STEPS.items() if "fp32" in step.dtypes and name != "split"]
    assert "split" not in names and "split" in cases.default_names("fp32", "cuda", queries=1)
    assert [name for name in names if name.startswith("step")] == takes
    assert cases.default_names("bf16", "cpu") == ("part0", "part4", "sdpa")
    with pytest.raises(ValueError, match="dtype is 'fp16'; no part takes it on the CPU"):
        cases.default_names("fp16", "cpu")


def test_the_step_before():
    assert cases.step_before("step1") is None and cases.step_before("part4") is None
    assert cases.step_before("step2") == cases.step_before("step2-unpadded") == "step1"
    assert cases.step_before("step3-spilled") == "step2"


def test_a_run_verifies_times_and_skips(monkeypatch):
    on_cpu(monkeypatch)
    done = measured(["part0", "step1", "sdpa-math", "sdpa-cudnn"])
    assert done.complete and done.busy is None
    assert [r.cell.contender for r in done.results] == ["part0", "step1", "sdpa-math", "sdpa-cudnn"] * 2
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


def test_what_is_wrong_is_not_timed(monkeypatch):
    right = contenders.attention
    monkeypatch.setattr(contenders, "attention", lambda part, q, k, v, **o: right("part0", q, k, v) * 1.01)
    done = measured(["step1"])
    assert {r.status for r in done.results} == {"wrong"} and not any(r.seconds for r in done.results)


def test_what_does_not_fit_is_skipped_and_inputs_that_do_not_are_refused(monkeypatch):
    def full(part, q, k, v, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot.")

    monkeypatch.setattr(contenders, "attention", full)
    done = measured(["part0"], gpu=FakeGpu(free=10**6))
    assert {r.note for r in done.results} == {"needs more memory than the GPU has free"}
    with pytest.raises(ValueError, match="N=64, queries=64, d=16, heads=2, batch=1 need 96 KiB, and 1000 B"):
        cuda.GpuBench(plan(["part0"], **CASE), gpu=FakeGpu(free=1000))


def test_bytes_are_counted_where_they_bound(monkeypatch):
    on_cpu(monkeypatch)
    done = measured(["step1"], lengths=(4096,), queries=1, dtype="bf16")
    assert {r.traffic for r in done.results} == {2 * 16 * (2 + 2 * 4096) * 2}
    assert done.tensor_peaks == {"bf16": 4e14} and done.peak(done.results[0].cell) == 4e14
    text = report.text(done, "md")
    rows = {result.cell.l2: report.row(done, result) for result in done.results}
    assert rows["cold"]["reading_share"] == 1e-3 / 2e-3 and rows["warm"]["reading_share"] == 5e-4 / 1e-3
    assert "| GB/s | of bandwidth | of reading |" in text
    assert "400 TFLOP/s in bf16 by PyTorch's product" in text
    assert {r.traffic for r in measured(["step1"], lengths=(512,)).results} == {None}


def test_a_gpu_whose_clock_changed_is_named(monkeypatch):
    on_cpu(monkeypatch)
    done = measured(["step1"], gpu=FakeGpu(peaks=(5e13, 4e13)))
    assert done.busy.startswith("The GPU's speed changed: its FMA peak went from 50.0 to 40.0 TFLOP/s")
    assert done.busy in report.header(done)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Nq, Nk", [(1, 100), (100, 100), (30, 77)])
def test_the_exact_output_in_slices(monkeypatch, causal, Nq, Nk):
    monkeypatch.setattr(measure, "SLICE", 250)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator) for n in (Nq, Nk, Nk))
    expected = attention("part0", q.double().float(), k, v, causal=causal)
    exact = measure.exact_output(q, k, v, causal)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_what_was_stopped_keeps_whole_rounds(monkeypatch, stop):
    """Four cells are verified, then timed in turn."""
    on_cpu(monkeypatch)
    bench = cuda.GpuBench(plan(["part0", "step1"], **CASE), 5, 0.01, gpu=FakeGpu())
    with contextlib.closing(bench.run()) as run:
        for _ in range(4 + stop):
            next(run)
    assert not bench.done.complete
    assert {len(r.seconds) for r in bench.done.results} == {stop // 4}


def test_the_reason_of_a_refusal():
    backend = contenders.SDPA["sdpa-flash"]
    warned = [
        "Memory efficient kernel not used because: (Triggered internally at sdp.cpp:1.)",
        "Memory efficient attention has been runtime disabled. (Triggered internally at sdp.cpp:2.)",
        "Flash attention kernel not used because: (Triggered internally at sdp.cpp:3.)",
        "Expected query, key and value to be Half.\nGot Float. (Triggered internally at sdp.cpp:4.)",
    ]
    error = RuntimeError("No available kernel. Aborting execution.\nmore")
    assert contenders.why_refused(backend, warned, error) == (
        "Expected query, key and value to be Half. Got Float."
    )
    assert contenders.why_refused(backend, warned[:2], error) == "No available kernel. Aborting execution."


def test_sequential_cpp_is_timed_at_a_size_that_takes_seconds():
    def small(**fields):
        case = dict(lengths=(4096,), widths=(32,), batch=100, heads=1, device="cuda") | fields
        return sequential.smaller(plan(["step1"], **case)[0])

    assert (small().N, small().batch, small().heads) == (4096, 1, 2)
    assert (small(batch=1).N, small(batch=1).heads) == (4096, 1)
    assert (small(lengths=(65536,)).N, small(lengths=(65536,)).heads) == (4096, 1)
    one = small(lengths=(65536,), queries=1)
    assert (one.N, one.queries, one.heads) == (65536, 1, 100)
    for cell in (small(), small(dtype="bf16", widths=(256,)), small(masks=[True])):
        assert cell.flops <= sequential.FLOPS
        assert (cell.contender, cell.device, cell.dtype, cell.l2) == ("part1", "cpu", "fp32", None)


def test_sequential_cpp_is_measured_and_scaled(extension, monkeypatch):
    on_cpu(monkeypatch)
    monkeypatch.setattr(contenders, "attention", attention)
    cell = plan(["step1"], **CASE)[0]
    monkeypatch.setattr(sequential, "FLOPS", cell.flops / 2)
    result = sequential.measure(cell)
    assert result.status == "ok" and len(result.seconds) == 3 and result.cell.heads == 1
    assert sequential.seconds(cell, [result]) == pytest.approx(2 * result.median)
    assert sequential.seconds(cell, []) is None


def test_a_saved_run_of_a_gpu_is_read_as_it_was(tmp_path, cli):
    done = gpu_run()
    report.save(done, tmp_path / "run.json")
    assert report.load(tmp_path / "run.json") == done
    shown = cli("bench", "--load", "run.json")
    assert shown.returncode == 0
    assert "FMA peak 50 TFLOP/s in fp32" in shown.stdout and "| over step before | over C++ |" in shown.stdout
    assert "sequential C++ (part1, one core of the CPU, N 4096, d 32, 2 heads): 2 s; scaled" in shown.stdout
    assert "TFLOP/s |" in shown.stdout and "GFLOP/s |" not in shown.stdout
    assert "threads" not in shown.stdout
    for form in ("csv", "jsonl"):
        assert "Fake GPU" in cli("bench", "--load", "run.json", "-o", form).stdout
    content = json.loads((tmp_path / "run.json").read_text())
    content["results"][0]["cell"]["device"] = "tpu"
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert "device is 'tpu'" in cli("bench", "--load", "run.json").stderr
    content["machine"]["gpu"] = {}
    content["results"][0]["cell"]["device"] = "cuda"
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert "gpu is {}" in cli("bench", "--load", "run.json").stderr


def test_a_file_without_devices_is_read(tmp_path, made):
    """Format 3 had none."""
    file = tmp_path / "run.json"
    report.save(made(), file)
    content = json.loads(file.read_text())
    content["format"] = 3
    for name in ("tensor_peaks", "sequential"):
        del content[name]
    for entry in content["results"]:
        for name in ("device", "l2"):
            del entry["cell"][name]
    file.write_text(json.dumps(content))
    assert report.load(file) == made()


def test_runs_of_two_gpus_are_compared(tmp_path):
    pytest.importorskip("scipy")
    before, now = gpu_run(), gpu_run(change=1.5)
    before.machine["gpu"]["name"] = "NVIDIA Old"
    compared = compare.compare(before, now)
    assert len(compared.differences) == 2 and compared.differences[0].cell.contender == "step3"
    text = compare.text(compared, before, now, 0.05)
    assert "The earlier run was on another GPU: NVIDIA Old." in text
    assert "| device | L2 |" in text and "threads" not in text


def test_the_ladder(tmp_path, cli):
    plots = pytest.importorskip("lab.bench.plots", exc_type=ValueError)
    done = gpu_run()
    figure = plots.ladder(done)
    over_cpp, over_before = figure.axes
    steps = [r.cell.contender for r in done.results if r.cell.contender.startswith("step")]
    heights = dict(zip(steps, (bar.get_height() for bar in over_cpp.patches)))
    # Step 1 takes 1 ms, and sequential C++ 2 s for 2 of 100 heads.
    assert heights["step1"] == pytest.approx(100 / 1.0045e-3) and heights["step3"] == pytest.approx(
        3e5 / 1.0045
    )
    heights = dict(zip(steps, (bar.get_height() for bar in over_before.patches)))
    assert heights["step1"] == 0 and heights["step3"] == pytest.approx(1.5)
    assert "2 heads): 2 s; scaled by work to 100 s" in figure.get_suptitle()
    assert "(100, 1, 4096, 32), fp32" in figure.get_suptitle()
    done.sequential = []
    assert len(plots.ladder(done).axes) == 1
    report.save(done, tmp_path / "run.json")
    drawn = cli("bench", "--load", "run.json", "--plot", "pictures")
    assert drawn.returncode == 0, drawn.stderr
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {"ladder.svg", "ladder.png"}
    done.results = [r for r in done.results if not r.cell.contender.startswith("step")]
    assert plots.ladder(done) is None


def test_the_command_measures_on_the_gpu(monkeypatch, cli, results):
    on_cpu(monkeypatch)
    monkeypatch.setattr(cuda, "Gpu", FakeGpu)
    small = ["-N", 64, "-d", 16, "--batch", 2, "-r", 2, "--min-time", 0]
    done = cli("bench", "part0,step2,sdpa-math", "--device", "cuda", *small, "--save", "run.json")
    assert done.returncode == 0, done.stderr
    assert "Fake GPU, compute capability 9.0, 132 multiprocessors" in done.stdout
    assert "N 64, d 16, batch 2, heads 1, mask none, device cuda\n" in done.stdout
    assert done.stdout.count("| step2 | ") == 2
    again = cli("bench", "step2", "--device", "cuda", *small, "--l2", "cold", "--save", "run.json")
    assert again.stdout.count("| step2 | ") == 1


def test_the_plan_of_the_homework(cli):
    done = cli("bench", "step1,step2", "--device", "cuda", "--dry-run")
    assert done.stdout.splitlines()[1] == (
        "step1, N 4096, queries 4096, d 32, batch 100, heads 1, mask none, dtype fp32, device cuda, L2 warm; "
        "215 GFLOP"
    )
    assert "N 128, queries 1, d 64, batch 2, heads 8, mask none, dtype bf16, device cuda" in cli(
        *("bench", "step1", "--device", "cuda", "--dry-run", "-N", 128, "-d", 64, "--queries", 1),
        *("--batch", 2, "--heads", 8, "--dtype", "bf16"),
    ).stdout  # fmt: skip


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-br", "64"], "-br does not go with --device cuda"),
        (["-bc", "64"], "-bc does not go with --device cuda"),
        (["--threads", "2"], "-t does not go with --device cuda"),
        (["--simd", "off"], "--simd does not go with --device cuda"),
        (["--tune"], "--tune does not go with --device cuda"),
        (["--load", __file__], "--device does not go with --load"),
        (["part2"], "contender is 'part2'; on CUDA it must be one of"),
        (["numba-registers", "--dtype", "fp16"], "contender 'numba-registers' takes fp32 only"),
    ],
)
def test_refused_on_cuda(failed, arguments, message):
    assert message in failed("bench", "--device", "cuda", *arguments)


def test_refused_on_the_cpu(failed):
    assert "--l2 goes with --device cuda only" in failed("bench", "--l2", "cold")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(failed):
    for arguments in ([], ["--save"], ["step1", "--plot", "pictures"]):
        assert "device is 'cuda', and" in failed("bench", "--device", "cuda", *arguments)


def test_the_bar_ends_where_the_run_does(monkeypatch):
    on_cpu(monkeypatch)
    totals, steps = [], []

    @contextlib.contextmanager
    def progress(total, doing):
        totals.append(total)
        yield lambda amount, what: steps.append(amount)

    monkeypatch.setattr(sweep, "progress", progress)
    monkeypatch.setattr(cuda, "Gpu", FakeGpu)
    sweep.measure(plan(["part0", "step2"], **CASE), 7, 0)
    assert sum(steps) == pytest.approx(totals[0])


def test_cells_of_a_gpu_are_none_of_a_cpu():
    cell: Cell = plan(["sdpa"], **CASE)[0]
    assert not cell.by_amx and cell != plan(["sdpa"], **CASE | {"device": "cpu"})[0]
