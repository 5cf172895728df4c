"""gpt.py explain part4 --device cuda: by count for an architecture, and measured where there is a GPU."""

import re
from unittest.mock import Mock

import pytest
from support import cell as of_sizes
from support import full

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import EVERY
from shakespeare.lab.bench.plan import Cell
from shakespeare.lab.cuda.architectures import SHEETS, architecture, occupancy
from shakespeare.lab.explain import compiled, explain


def cell(**change) -> Cell:
    return of_sizes("part4", device="cuda", **{"N": 256, "batch": 2, "heads": 3} | change)


def explained(kernel=None, arch=None, **change) -> str:
    lines: list[str] = []
    explain(cell(**change), lines.append, kernel=kernel, arch=arch)
    return "\n".join(lines)


# One of them is compiled by default. Kernel 6 is not for every architecture.
CASES = [("2", "sm_90")]
CASES += [full(kernel, "sm_90") for kernel in EVERY if kernel != "2"]
CASES += [full(kernel, arch) for kernel in ("2", "5", "6") for arch in SHEETS if arch != "sm_90"]


@pytest.mark.parametrize("kernel, arch", CASES)
def test_each_kernel_is_explained_without_a_gpu(nvrtc, arch, kernel):
    row, on = EVERY[kernel], SHEETS[arch]
    dtype = row.dtypes[0]
    if not row.runs_on(on.capability, dtype):
        with pytest.raises(ValueError, match=f"kernel is '{kernel}'; it needs compute capability"):
            explained(arch=arch, kernel=kernel, dtype=dtype)
        return
    text = explained(arch=arch, kernel=kernel, dtype=dtype)
    sizes = f"6 heads of N = 256, d = 32, {dtype}, no mask"
    assert text.startswith(f"part4, kernel {kernel}, {row.summary}: {sizes}\n")
    assert f"{on.name}, {on.multiprocessors} multiprocessors" in text and "by its data sheet" in text
    spilled = "none|" if kernel != "3-spilled" else ""
    pattern = rf"^registers   \d+ a thread; spilled: ({spilled}[1-9]\d* B stored, \d+ B loaded);"
    assert re.search(pattern, text, re.M)
    assert "counted from ptxas's report" in text and ", limited by " in text
    assert text.endswith("measured    not: this is counted for an architecture, without a GPU")
    limits = {name: float(ms) for ms, name in re.findall(r"([\d.e-]+) ms for (.+?) \(", text)}
    assert re.search(r"^bound by    (.+)$", text, re.M)[1] == max(limits, key=limits.get)
    assert re.search(r"^  all +(\S+ \S+ +\S+ x|- +-) +\S+ \S+ +\S+ \S+$", text, re.M), text
    assert {"memory", "exponentials"} < set(limits)
    command = (
        f" python gpt.py explain part4 --device cuda --kernel {kernel} --dtype {dtype} -B 2 --heads 3 -N 256"
    )
    assert ("shared memory" in limits) == (command not in text) == (kernel[0] in "12345")


def test_the_command(cli, nvrtc):
    done = cli(*"explain part4 --device cuda --arch sm_90 --kernel 2 --causal -d 40".split())
    assert "100 heads of N = 4096, d = 40, fp32, causal" in done.stdout
    pairs = 4096 * 4097 / 2
    assert f"arithmetic  {4 * 100 * 40 * pairs / 1e12:.3g} TFLOP" in done.stdout


def test_wrong_options(failed, monkeypatch):
    monkeypatch.setattr(driver, "check_gpu", Mock(side_effect=BuildError("there is no GPU")))
    for arguments, message in (
        ("part0 --device cuda", "PART is part0; it must be part4"),
        ("part4 --device cuda --simd off", "simd is 'off'; it must be left out on CUDA"),
        ("part4 --device cuda --cachegrind", "--cachegrind does not go with --device cuda"),
        ("part4 --arch sm_90", "--arch goes with --device cuda only"),
        ("part4 --device cuda --arch sm_90 -N 9 --queries 10 --causal", "at most N=9 with a"),
        ("part4 --device cuda --arch sm_20", "'sm_20' is not one of"),
        ("part4 --device cuda --arch sm_90 -d 257", "d is 257; it must be at most 256 on CUDA"),
        ("part4 --device cuda --arch sm_90 -N 99999999", "N is 99999999; it must be at most"),
        ("part4 --device cuda", "there is no GPU; --arch sm_80|sm_90|sm_100 explains a kernel without a GPU"),
    ):
        assert message in failed("explain", *arguments.split())


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("d", [32, 128])
def test_the_driver_counts_the_same_blocks(gpu, kernel, d):
    row, on = EVERY[kernel], gpu
    dtype = row.dtypes[0]
    if not row.runs_on(on.capability, dtype):
        pytest.skip(f"{on.name} cannot run kernel {kernel}")
    answer = compiled(cell(d=d, dtype=dtype), kernel)
    assert answer.driver and answer.blocks == min(answer.fits.values())
    tile = answer.kernel.tile
    own = occupancy(architecture(on), tile.threads, answer.resources.registers, tile.shared)
    assert min(own.values()) == answer.blocks


def test_it_is_measured_on_a_gpu(gpu):
    text = explained(N=2048, batch=20)
    limits = [float(ms) for ms in re.findall(r"([\d.e-]+) ms for ", text)]
    measured = float(re.search(r"^measured    ([\d.]+) ms", text, re.M)[1])
    assert measured > 0.9 * max(limits)  # no kernel is faster than its bounds
