"""Every step compiles with NVRTC, without a GPU; its registers and spills are read."""

from __future__ import annotations

import functools
import math

import pytest
from support import naming

from attention_ext.build import nvrtc
from attention_ext.cuda import kernels, steps
from attention_ext.cuda.steps import STEPS
from attention_ext.parts import BuildError, Dtype

SHARED = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}  # bytes for a block, by NVIDIA's guide
WIDTHS = (32, 64, 128)
SPILLING = 64  # bytes that a kernel may spill and still keep its state in registers


@functools.cache
def resources(name, d, dtype, capability):
    step = STEPS[name]
    tile = step.tile(d, dtype, SHARED[capability])
    return kernels.source(step, tile, d, dtype, capability).compile()[1]


def check(name, d, dtype, capability=(9, 0)):
    """Compile a step; check that its state stays in registers and its products run beside the rest."""
    found = resources(name, d, dtype, capability)
    spilled = math.inf if name == "3-spilled" else 0 if name == "6" else SPILLING
    with naming(d, dtype, capability):
        assert 0 < found.registers <= 255 and found.spill_stores <= spilled and found.losses == (), found


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", STEPS)
def test_each_source_compiles(name):
    step = STEPS[name]
    for dtype in {step.source(dtype): dtype for dtype in step.dtypes}.values():
        check(name, 64, dtype)


@pytest.mark.full
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability", SHARED, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("name", STEPS)
def test_each_step_compiles_for_each_architecture(name, capability):
    step = STEPS[name]
    if not step.runs_on(capability):
        pytest.skip(f"step {name} is not for compute capability {capability[0]}.{capability[1]}")
    for dtype in step.dtypes:
        for d in WIDTHS if capability == (9, 0) and dtype is not Dtype.FP16 else (64,):
            check(name, d, dtype, capability)
    if name == "6":  # wider tiles, and columns that are filled
        for d in (40, 192, 256):
            check(name, d, Dtype.BF16)


@pytest.mark.full
@pytest.mark.usefixtures("nvrtc")
def test_only_the_spilling_state_spills():
    for d in WIDTHS:
        spilled, kept = (resources(name, d, Dtype.FP32, (9, 0)) for name in ("3-spilled", "3"))
        assert spilled.spill_stores > 4 * d > 0 == kept.spill_stores, d
        assert spilled.registers < kept.registers, d


def test_the_source_is_kept_and_found(nvrtc, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    source = kernels.source(STEPS["2"], STEPS["2"].tile(32, Dtype.FP32, 10**6), 32, Dtype.FP32, (9, 0))
    code = source.make()
    assert code[:4] == b"\x7fELF"
    told = capsys.readouterr().err
    assert "Compiling step2.cu for sm_90..." in told and "Compiled in" in told
    assert source.make() == code and capsys.readouterr().err == ""
    other = kernels.source(STEPS["2"], STEPS["2"].tile(33, Dtype.FP32, 10**6), 33, Dtype.FP32, (9, 0))
    assert other.path() != source.path()


def test_a_directory_that_others_can_write_to_is_refused(nvrtc, tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(BuildError, match="can be written by everybody"):
        kernels.source(STEPS["1"], STEPS["1"].tile(32, Dtype.FP32, 10**6), 32, Dtype.FP32, (9, 0)).make()


@pytest.mark.usefixtures("nvrtc")
def test_an_error_of_the_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("attention_ext.build.nvrtc.SOURCES", tmp_path)
    (tmp_path / "wrong.cu").write_text("not C++\n")
    message = r"\ANVRTC failed to compile wrong.cu for sm_90: .*error.*\Z"  # `.` matches no line end
    with pytest.raises(BuildError, match=message):
        nvrtc.Source.of("wrong.cu", "sm_90", {}).compile()


def test_ptxas_report():
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90'
    32 bytes stack frame, 52 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1024 bytes smem"""
    assert nvrtc.parse(log) == nvrtc.Resources(64, 32, 52, 44, 1024)
    waits = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert nvrtc.parse(f"{log}\n{waits}").losses == (waits,)


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(
        BuildError, match=r"^CUDA kernels need .* cuda.core is missing; pip install cuda-core .*$"
    ):
        nvrtc.versions()


def test_the_table():
    for name, step in STEPS.items():
        assert name == step.name
        assert all((nvrtc.SOURCES / step.source(dtype)).is_file() for dtype in step.dtypes)
        for d in range(1, steps.WIDEST + 1):
            assert d <= step.padded(d) < d + step.multiple
            for dtype in step.dtypes:
                tiles = [tile for n in (1, 3, 9) for tile in step.tiles(step.padded(d), dtype, n)]
                assert tiles and all(tile.shared > 0 < tile.br for tile in tiles)
    for dtype in Dtype:
        fastest = next(name for name in steps.FASTEST if dtype in STEPS[name].dtypes)
        assert steps.default(64, dtype, (9, 0), 227 * 1024).name == fastest
    with pytest.raises(ValueError, match="no step takes d = 64 on this GPU, of compute capability 7.0"):
        steps.default(64, Dtype.FP32, (7, 0), 96 * 1024)
