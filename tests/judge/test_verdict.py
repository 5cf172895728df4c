"""gpt.py try: planted mistakes are found and named, right kernels are right, and the command's report."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import CUDA, FLASH, MISTAKES, NAIVE, NUMPY, RIGHT, SECONDS, TORCH, WITH_SANITIZER, find
from support import ROOT, anchors, naming
from torch.nn.functional import scaled_dot_product_attention as sdpa

from shakespeare import generate
from shakespeare.app.server.requests import CompletionBody
from shakespeare.attention_ext import attention, user_kernel
from shakespeare.attention_ext.build import toolchain
from shakespeare.attention_ext.parts import SUFFIXES, Dtype
from shakespeare.judge import hints, ranking, report, sanitizers, speed, starts
from shakespeare.judge.cases import CASES, expected, inputs, seeded
from shakespeare.judge.speed import Figures, Size
from shakespeare.judge.verdict import SIMULATED_WORK, Verdict
from shakespeare.model import load

QUICK = ("openmp", "numpy")  # that the default tests try
DEFAULT = {"beyond a row", "one scratch for all", "the last key"}


def skip_without(suffix: str) -> None:
    if suffix == ".ispc" and not toolchain.find_ispc():
        pytest.skip("ispc is missing")
    if suffix == ".cu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")


def test_some_mistakes_are_found(tried):
    find(tried, [m for m in MISTAKES if m.name in DEFAULT])


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".cpp", ".py", ".ispc", ".cu"])
def test_all_mistakes_are_found(tried, suffix):
    skip_without(suffix)
    left_out = () if shutil.which("compute-sanitizer") else WITH_SANITIZER
    mistakes = [
        m for m in MISTAKES if m.suffix == suffix and m.name not in left_out and m.name not in DEFAULT
    ]
    find(tried, mistakes)


def test_without_a_gpu_a_kernel_in_cuda_is_compiled(tried, nvrtc, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = tried("mine.cu", CUDA)
    assert "it compiles for sm_90" in found.refused and "not tried" in found.refused
    (tmp_path / "body.cuh").write_text(CUDA.replace("call.scale", "call.nothing"))
    found = tried("mine.cu", '#include "body.cuh"')
    assert "body.cuh(" in found.refused and "nothing" in found.refused


def test_a_kernel_of_the_ladder_is_tried_in_its_dtypes(checker, nvrtc, tmp_path):
    for kernel, dtype in (("4", Dtype.FP32), ("5", Dtype.FP16), ("6", Dtype.BF16)):
        with naming(kernel):
            file = tmp_path / f"mine{kernel}.cu"
            starts.write(file, kernel=kernel, dtype=dtype)
            found = checker.check(file, SECONDS, dtype=dtype)
            assert found.right or re.search("compiles for sm_90|needs compute capability", found.why), found
    (tmp_path / "kernel5.h").write_text("#error edited")  # a header beside the file is its own
    assert "edited" in checker.check(tmp_path / "mine5.cu", SECONDS, dtype=Dtype.FP16).why


def test_16_bits_have_their_own_tolerance():
    """PyTorch's result in 16 bits is right, and that with a scale 2 % off is wrong in most cases."""
    for dtype in (Dtype.BF16, Dtype.FP16):
        wrong = 0
        for case in seeded(0, dtype=dtype):
            exact = [torch.tensor(t) for t in inputs(case)]
            given = [t.to(getattr(torch, dtype.torch_name)) for t in exact]
            assert all(map(torch.equal, exact, (t.float() for t in given)))
            mask = torch.from_numpy(case.seen())
            out, off = (sdpa(*given, mask, scale=case.applied * by) for by in (1, 1.02))
            with naming(case):
                assert expected(case).allows(out.double().numpy())
            wrong += not expected(case).allows(off.double().numpy())
        assert wrong > 9


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in RIGHT]
)
def test_right_kernels_are_right(tried, tmp_path, name):
    suffix, text = RIGHT[name]
    skip_without(suffix)
    if "numba" in text:
        pytest.importorskip("numba")
    found = tried(f"mine{suffix}", text)
    assert found.right, (found.finding, found.refused)
    simulated = user_kernel.read(tmp_path / f"mine{suffix}").simulated
    assert found.tried == sum(not simulated or case.work <= SIMULATED_WORK for case in CASES)


def test_python_and_the_engine_call_the_file(extension, tmp_path, monkeypatch):
    """The text is that of part4 if the kernel is right, and another one if it is not."""
    monkeypatch.chdir(tmp_path)
    Path("mine.cpp").write_text('#include "lib/flash.hpp"\n')
    Path("lib").mkdir()
    Path("lib/flash.hpp").write_text(FLASH)
    q, k, v = (torch.randn(2, 3, n, 24) for n in (9, 30, 30))
    out = attention("./mine.cpp", q, k, v, causal=True)
    torch.testing.assert_close(out, attention("part0", q, k, v, causal=True))
    model = load("shakes128")
    texts = {part: generate(model, "ROMEO:", 40, part=part) for part in ("part4", "./mine.cpp")}
    assert texts["part4"] == texts["./mine.cpp"]
    Path("lib/flash.hpp").write_text(FLASH.replace("= O[i * d + c] / l[i]", "= 0"))  # it is compiled again
    assert generate(model, "ROMEO:", 40, part="./mine.cpp") != texts["part4"]
    assert not attention("./mine.cpp", q, k, v).any()
    count = "    with open('called', 'a') as file:\n        file.write('.')\n    Nq, Nk"
    counting = NUMPY.replace("    Nq, Nk", count)
    Path("mine.py").write_text("\ufeff" + counting)  # with an editor's byte order mark
    assert generate(model, "ROMEO:", 40, part="mine.py") == texts["part4"]
    assert len(Path("called").read_text()) == 40 * model.config.n_layer
    Path("other.py").write_text("from lib.numbers import SIGN\n")
    Path("mine.py").write_text(
        "from other import SIGN\n" + NUMPY.replace("np.float32(scale)", "SIGN * np.float32(scale)")
    )
    for sign in (1, 9):
        Path("lib/numbers.py").write_text(f"SIGN = {sign}\n")  # both in the same second
        same = generate(model, "ROMEO:", 40, part="mine.py") == texts["part4"]
        assert same == (sign == 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("mine.py").write_text(NUMPY)  # the same name in another folder is another file
    assert generate(model, "ROMEO:", 40, part="mine.py") == texts["part4"]


def test_wrong_uses_are_named(extension, tmp_path):
    with pytest.raises(ValueError):  # a request names no file
        CompletionBody(prompt="x", part="mine.cpp")
    q = torch.zeros(1, 1, 4, 8)
    file = tmp_path / "mine.cpp"
    with pytest.raises(ValueError, match=r"mine.cpp'; there is no such file"):
        attention(str(file), q, q, q)
    file.write_text("int other() { return 1; }  // no attention")
    with pytest.raises(user_kernel.BuildError, match="must define void attention"):
        attention(str(file), q, q, q)
    file.write_text('#include "attention.h"\nvoid attention(const Attention& a, float*) { a.nothing; }')
    with pytest.raises(user_kernel.BuildError, match=r"mine.cpp:2:\d+: error: .*nothing"):
        attention(str(file), q, q, q)
    file.write_text(NAIVE)
    with pytest.raises(ValueError, match="return_lse is True; it must be False"):
        attention(str(file), q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="for gradients in fp32"):
        attention(str(file), q.clone().requires_grad_(), q, q)
    with pytest.raises(ValueError, match="engine is 'native'; it must be 'torch'"):
        generate(load("shakes128"), "R", 2, part=str(file), engine="native")
    (tmp_path / "mine.cu").write_text(CUDA)
    with pytest.raises(ValueError, match="q is on cpu; it must be on CUDA"):
        attention(str(tmp_path / "mine.cu"), q, q, q)


def test_the_ladder_and_the_hints():
    ladder = {"part1": 100.0, "part2": 3.0, "part3": 8.0, "part4": 2.5, "sdpa": 6.0}

    def timed(ms: float, device="cpu", small_ms=0.0, wide_ms=None, scratch=4 << 20) -> Figures:
        rungs = ladder if device == "cpu" else {"kernel1": 9.0, "kernel2": 1.0}
        times = rungs | {"own": ms}
        small = small_ms or ms / 256
        return Figures(times, 0.537e9, 120e9, 1 << 20, "a CPU", device, small, wide_ms, 1e-9, 16, scratch)

    for figures, place in (
        (timed(50), "between part1 and part3"),
        (timed(200), "slower than part1"),
        (timed(1), "faster than part4"),
        (timed(5, "cuda"), "between kernel1 and kernel2"),
    ):
        assert speed.place(figures) == place
    for figures, text, words in (
        (timed(50), "", "gives 7.5"),
        (timed(12, small_ms=0.01), "", "the matrices leave the cache"),
        (timed(14), "", "S takes 4 MiB"),
        (timed(14, wide_ms=18.0), "", "71 % of the time"),
        (timed(14, scratch=0), "", "keep a block of sums in registers"),
        (timed(14, scratch=0), "simd::multiply(", "4 KiB apart"),
        (timed(7, scratch=1 << 19), "", "leaves the first caches"),
        (timed(5.5), "", "of the peak"),
        (timed(5, "cuda"), "", "kernel2 takes 1 ms"),
        (timed(1, "cuda"), "", "tensor cores are next"),
    ):
        assert words in hints.hint(figures, Size(), text)[0]
    assert "cuDNN" in hints.hint(timed(1, "cuda"), Size(dtype="bf16"), "")[0]


def test_the_pages_of_the_hints_exist():
    for page in (*(page for page, _ in hints.HINTS.values()), report.MISTAKES):
        file, anchor = page.split("#")
        assert anchor in anchors(ROOT / file), page


def test_the_command(cli, failed, extension, tmp_path):
    assert "there is no such file" in failed("try", "mine.cpp")
    assert "must end with .cpp, .ispc, .cu, .py" in failed("try", "mine.txt")
    assert "Missing argument" in failed("try")
    for suffix in SUFFIXES:
        cli("try", "--new", f"mine{suffix}")
    assert "that file exists" in failed("try", "--new", "mine.cpp")
    Path("kernel5.h").touch()
    assert "kernel5.h exists" in failed("try", "--new", "five.cu", "--from", "kernel5")
    assert "it must be fp32 for kernel4.cu" in failed(
        "try", "--new", "a.cu", "--from", "kernel4", "--dtype", "bf16"
    )
    assert "--from goes with --new FILE.cu only" in failed("try", "mine.cu", "--from", "kernel6")
    assert "it must be fp32 for mine.cpp" in failed("try", "mine.cpp", "--dtype", "fp16")
    assert "python gpt.py try 'restart. 1.cpp'\n" in cli("try", "--new", "restart. 1.cpp").stderr
    assert "-N does not go with --inference" in failed("try", "mine.cpp", "-N", 3, "--inference")
    Path("mine.cpp").write_text(NAIVE.replace("a.scale * s", "s"))
    shown = cli("try", "mine.cpp", code=1).stdout
    for words in ("mine.cpp is wrong", "first at    1 head of N = 4, d = 8", "are not scaled", "####"):
        assert words in shown, words


@pytest.mark.full
def test_the_report_of_a_right_kernel(cli, extension):
    Path("mine.cpp").write_text(NAIVE)
    done = cli("try", "mine.cpp", "-N", 256, "--seconds", SECONDS, "--cachegrind")
    assert f"mine.cpp is right in {len(CASES)} cases" in done.stdout
    for title in ("memory", "speed", "ladder", "scratch", "what now", "read"):
        assert f"\n{title} " in done.stdout, title
    assert ranking.HOW in " ".join(done.stdout.split())
    done = cli("try", "mine.cpp", "--inference", "-m", "shakes128", "--max-new-tokens", 9, "--num-samples", 1)
    assert "mine.cpp, torch engine" in done.stderr
    Path("mine.py").write_text(TORCH)
    call = ("try", "mine.py", "-N", 64, "--heads", 1, "--seconds", SECONDS, "--json")
    found = json.loads(cli(*call).stdout)
    assert found["right"] and found["tried"] == len(CASES)
    assert found["speed"]["share"] > 0 and found["hint"]["text"]


@pytest.mark.full
def test_other_commands_take_a_file(cli, failed, extension):
    assert "part is 'none.cpp'; there is no such file" in failed("explain", "none.cpp")
    Path("mine.cpp").write_text(FLASH)
    assert "mine.cpp" in cli("explain", "mine.cpp", "-N", 64).stdout
    shown = cli("bench", "mine.cpp,part2", "-N", 64, "-r", 2, "--min-time", 0.01).stdout
    assert "| mine.cpp |" in shown
    shown = cli("race", "part4,mine.cpp", "-m", "shakes128", "--max-new-tokens", 20).stdout
    assert "identical: all 2 texts" in shown
    assert "mine.cpp" in cli("profile", "mine.cpp", "-m", "shakes128", "--tokens", 4).stdout


def test_watching_answers_each_save(process, tmp_path, extension):
    file = tmp_path / "mine.cpp"
    file.write_text('#include "naive.hpp"\n')
    (tmp_path / "naive.hpp").write_text(NAIVE.replace("a.scale * s", "s"))
    running = process("try", file, "--watch", "--seconds", SECONDS, PYTHONUNBUFFERED="1")
    lines = iter(running.stdout.readline, "")
    assert next(line for line in lines if "mine.cpp is" in line) == "mine.cpp is wrong\n"
    next(line for line in lines if line.startswith("memory"))
    (tmp_path / "naive.hpp").write_text(NAIVE)
    assert next(line for line in lines if "mine.cpp is" in line) == "mine.cpp is right in 29 cases\n"


def test_a_crash_in_another_command_is_a_sentence(process, tmp_path, extension):
    (tmp_path / "mine.cpp").write_text(NAIVE.replace("float* O = a.out_at(b, h);", "float* O = nullptr;"))
    running = process("bench", "mine.cpp", "-N", 64)
    _, said = running.communicate()
    assert running.returncode == 1
    assert "mine.cpp crashed" in said and "gpt.py try mine.cpp" in said


def test_reports_of_sanitizers_are_read():
    said = """==1==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x10 at pc 0x1 bp 0x2 sp 0x3
READ of size 4 at 0x10 thread T0
    #0 0x55 in attention(AttentionOf<float> const&, float*) /a/mine.cpp:28
0x10 is located 0 bytes to the right of 16-byte region [0x0a,0x10)
q at 0x01, k at 0x0a"""
    found = sanitizers.parse_address_sanitizer(said, "mine.cpp")
    assert found.sentence == "read of 4 bytes beyond k at mine.cpp:28"
    memcheck = """========= Invalid __global__ read of size 4 bytes
=========     at attention+0x1e0 in mine.cu:31"""
    found = sanitizers.parse_compute_sanitizer(memcheck, "mine.cu")
    assert found.sentence == "read of 4 bytes out of bounds of global memory at mine.cu:31"
    race = "========= Error: Race reported between Write access at attention+0x1 in mine.cu:24"
    assert sanitizers.parse_compute_sanitizer(race, "mine.cu").kind == "race"


def test_pictures_and_spans():
    assert report.spans([0, 1, 2, 5]) == "0 to 2, 5"
    assert report.picture(np.array([[0.0, 2, 200, 20_000, np.inf]])) == [".-+#?"]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root's rights on Linux are tested")
def test_what_a_sanitizer_runs_cannot_read_the_judge_s_memory(extension, tmp_path):
    file, seen = tmp_path / "mine.cpp", tmp_path / "seen"
    hook = f'#include <cstdlib>\nint once = std::system("cat /proc/self/status > {seen}");\n'
    file.write_text(hook + NAIVE)
    verdict = Verdict()
    verdict.sanitize(file)
    assert verdict.right
    assert re.search(r"CapEff:\s*0+6\n", seen.read_text())
