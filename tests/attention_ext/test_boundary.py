"""bindings/boundary.h: errors of an operator whose library has a C++ runtime of its own."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import printed

from shakespeare.attention_ext.build import toolchain
from shakespeare.attention_ext.build.recipes import CSRC

SOURCE = """
#include "bindings/boundary.h"
#include <torch/csrc/stable/tensor.h>

int64_t same(const torch::stable::Tensor& t, int64_t size) {
    REQUIRE(t.numel() == size, "t has ", t.numel(), " numbers; it must have ", size);
    if (size == 2) throw std::bad_alloc();
    if (size == 3) throw 3;
    return size;
}
STABLE_TORCH_LIBRARY(boundary, m) { m.def("same(Tensor t, int size) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(boundary, CPU, m) { m.impl("same", BOX(&same)); }
"""
CALLS = """
import sys, torch
torch.ops.load_library(sys.argv[1])
for count, size in ((1, 5), (1, 5), (2, 2), (3, 3), (1, 1)):
    try:
        print(torch.ops.boundary.same(torch.zeros(count), size))
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
STATIC = ["-static-libstdc++", "-static-libgcc"]
# As wheels are linked, so that zig compiles its C++ library, for two minutes, for both.
TARGET = ["-target", f"{platform.machine()}-linux-gnu.2.17", "-s"]
ZIG = [sys.executable, "-m", "ziglang", "c++", *TARGET]


@pytest.mark.full
@pytest.mark.parametrize("command", [["c++"], ["g++", *STATIC], ZIG], ids=["c++", "static", "zig"])
def test_an_error_in_an_operator_is_raised_in_python(tmp_path: Path, command):
    """Thrown across the boundary, the second and third runtime's exceptions end the process."""
    if command is ZIG:
        pytest.importorskip("ziglang")
    (tmp_path / "same.cpp").write_text(SOURCE)
    library = Path(torch.__file__).parent / "lib"
    arguments = [
        *("-std=c++17", "-O1", "-shared", "-fPIC", *(f for f in toolchain.FLAGS if f.startswith("-f"))),
        *(f"-I{folder}" for folder in (CSRC, Path(torch.__file__).parent / "include")),
        *(str(tmp_path / "same.cpp"), "-o", str(tmp_path / "same.so")),
        *(f"-L{library}", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    subprocess.run([*command, *arguments], check=True)
    count, *others = printed(sys.executable, "-c", CALLS, tmp_path / "same.so").splitlines()
    assert others == [count, "there is not enough memory", "an operator failed", "1"]
    assert count == "t has 1 numbers; it must have 5"
