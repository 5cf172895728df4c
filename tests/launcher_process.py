"""Runs the launcher of the CUDA kernels without a GPU, in a process of its own: python launcher_process.py

Its operator is compiled for tensors of the CPU. A library of a few functions stands in for CUDA's driver
and for PyTorch's part for CUDA. Instead of a kernel, Python reads the arguments of a launch as the kernel
would, and computes attention from what they point at.
"""

import ctypes
import dataclasses
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shakespeare.attention_ext import reference
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import KERNELS, Gpu, Kernel, choose
from shakespeare.attention_ext.cuda.launches import RULES
from shakespeare.attention_ext.cuda.tiles import Queries
from shakespeare.attention_ext.parts import Dtype
from shakespeare.attention_ext.rules import Rules, ScoreMod, checked
from shakespeare.attention_ext.user_kernel import CudaCall

STREAM = 7
STAND_IN = """
#include <stddef.h>
#include <stdint.h>
static int (*launched)(void*, void**);
void on_launch(int (*function)(void*, void**)) { launched = function; }
int cuGetErrorString(int error, const char** text) { return *text = "wrong", 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)1, 0; }
static _Thread_local void* current;
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxSetCurrent(void* context) { return current = context, 0; }
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, uint64_t address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int l2, int fill) { return 0; }
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
    const unsigned blocks = *(const unsigned*)config;
    return blocks == 0 ? 1 : current ? launched(function, arguments) : 201;
}
int cuMemsetD32Async(unsigned* at, unsigned value, size_t count, void* stream) { return 0; }
int aoti_torch_get_current_cuda_stream(int index, void** stream) { return *stream = (void*)STREAM, 0; }
int aoti_torch_create_cuda_guard(int index, void** guard) { return *guard = 0, 0; }
int aoti_torch_delete_cuda_guard(void* guard) { return 0; }
"""


OF_DOCUMENTS = 9  # a function
LAUNCHED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
ON = Gpu("A GPU", (9, 0), 227 * 1024, 4)
running: driver.Compiled  # what the next launches must be of
asked: list[str | None] = []  # the kernels that the launcher has asked Python for
planned: list[tuple[int, ScoreMod | None]] = []  # for what rules
wrong: list[BaseException] = []  # what a launch raised
dtype_of_call = torch.float32


def matrices(at: int, strides: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    extent = 1 + sum(stride * (n - 1) for stride, n in zip(strides, shape))
    data = (ctypes.c_char * (extent * dtype.itemsize)).from_address(at)
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, strides)


def follow(function: int, arguments: Any, dtype: torch.dtype) -> None:
    """Compute attention at the last launch of a call."""
    call = CudaCall.from_address(arguments[3 if "BOX" in running.tile.sizes else 0])
    last = function == len(running.row.functions)
    if running.row.name == "1":  # a launch for each tile of keys
        last = ctypes.c_int.from_address(arguments[2]).value + running.tile.bc >= call.Nk
    if not last:
        return
    scale = call.scale * math.log(2)
    given: dict[str, Any] = dict(causal=bool(call.causal), scale=scale, return_lse=True)
    if call.rules.bias:
        s = call.rules.bias_strides
        shape = call.batches, call.heads, call.Nq, call.Nk
        bias = matrices(call.rules.bias, (s.batch, s.head, s.row, 1), shape, torch.float32)
        given["rules"] = Rules(bias=bias, score_mod=planned[-1][1])
    out, lse = reference.attention(*read(call, dtype), **given)
    s = call.out_strides
    matrices(call.out, (s.batch, s.head, s.row, 1), out.shape, dtype).copy_(out)
    if call.lse:
        matrices(call.lse, lse.contiguous().stride(), lse.shape, torch.float32).copy_(lse)


def read(call: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v of a call, as a kernel would read them."""
    found, row = [], running.row
    for name in "qkv":
        s = getattr(call, f"{name}_strides")
        n = call.Nq if name == "q" else call.Nk
        strides, shape = (s.batch, s.head, s.row, 1), (call.batches, call.heads, n, running.width)
        address = getattr(call, name)
        if row.multiple > 1:
            used = [stride for stride, entries in zip(strides, shape[:3]) if entries > 1]
            assert not any(each * dtype.itemsize % 16 for each in used) and address % 16 == 0
        found.append(matrices(address, strides, shape, dtype).float())
    return found


def loaded() -> Any:
    """The operators, over the stand-in. Its launches go to follow()."""
    work = Path(tempfile.mkdtemp())
    (work / "standin.c").write_text(f"#define STREAM {STREAM}\n{STAND_IN}")
    for name in ("libtorch_cuda.so", "libcuda.so.1"):  # found by these names, as they are loaded already
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", work / "standin.c", "-o", work / name]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(work / name))
    library.on_launch(on_launch)
    made = recipes.launcher()
    recipes.launcher = lambda: dataclasses.replace(made, flags=(*made.flags, "-DLAUNCHER_DEVICE=CPU"))
    driver.compiled = compiled
    driver.gpu = lambda index: ON
    functions = {"attention_documents": OF_DOCUMENTS}
    driver.load = lambda row, tile, d, *_: driver.Compiled(row, tile, d, ON, None, functions)
    from shakespeare.attention_ext.cuda import operators

    return operators


def compiled(kernel, call, d, dtype, index, rules=0, mod=None) -> driver.Compiled:
    asked.append(kernel)
    planned.append((rules, mod))
    return chosen(kernel, d, dtype, call.Nq)


def chosen(kernel: str | None, d: int, dtype: Dtype, Nq: int) -> driver.Compiled:
    row, tile = choose(kernel, d, dtype, ON, Queries(Nq))
    functions = {name: number + 1 for number, name in enumerate(row.functions)}
    return driver.Compiled(row, tile, row.padded(d), ON, None, functions)


@LAUNCHED
def on_launch(function, arguments) -> int:
    try:
        follow(function, arguments, dtype_of_call)
        return 0
    except BaseException as error:
        wrong.append(error)
        return 1


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Tensors of these shapes, with all kinds of strides."""
    B, H, Nq, Nk, d = shape
    q, k, v = (torch.randn(B, H, n, d).to(dtype) for n in (Nq, Nk, Nk))
    pad = torch.nn.functional.pad
    return [
        [q, k, v],
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
        [t.mT.contiguous().mT for t in (q, k, v)],
        *([pad(t, (0, more))[..., :d] for t in (q, k, v)] for more in (1, 16)),
        [pad(t.flatten(), (1, 0))[1:].view_as(t) for t in (q, k, v)],
        [t[:, :1].expand_as(t) for t in (q, k, v)],
        [t[:, :, :1].expand_as(t) for t in (q, k, v)],
    ]


def check(operators: Any, kernel: Kernel, dtype: Dtype, shape: tuple[int, ...], causal: bool) -> int:
    """Call a kernel with all kinds of strides; compare with part0. Returns the number of calls."""
    global running, dtype_of_call
    *_, Nq, Nk, d = shape
    dtype_of_call = getattr(torch, dtype.torch_name)
    running = chosen(kernel.name, d, dtype, Nq)
    before, cases = len(asked), inputs(shape, dtype_of_call)
    for q, k, v in cases:
        out, lse = operators.flash_with_lse(q, k, v, causal, None, kernel.name)
        assert out.is_contiguous() and out.shape == q.shape
        expected = reference.attention(q, k, v, causal=causal, scale=d**-0.5, return_lse=True)
        close = 1e-5 if dtype is Dtype.FP32 else 1e-2
        torch.testing.assert_close((out, lse), expected, rtol=close, atol=close)
        assert torch.equal(out, operators.flash(q, k, v, causal, d**-0.5, kernel.name))
    assert len(asked) <= before + 1, "Python was asked twice for the same sizes"
    named = [operators.flash(*case, causal, None, kernel.name) for case in cases]
    running = chosen(None, d, dtype, Nq)
    for (q, k, v), expected in zip(cases, named):
        unnamed = operators.flash(q, k, v, causal, None)
        assert unnamed.stride() == operators._out(q, None).stride()
        torch.testing.assert_close(unnamed, expected, rtol=close, atol=close)
    return 4 * len(cases)


def check_documents(operators: Any) -> None:
    """documents.cu is launched before a kernel, which gets what it writes."""
    global follow
    seen: list[list[Any]] = []

    def keep(function: int, arguments: Any, dtype: torch.dtype) -> None:
        if function == OF_DOCUMENTS:
            numbers = [ctypes.c_int64.from_address(arguments[place]).value for place in (0, 1)]
            seen.append([*numbers, ctypes.c_int.from_address(arguments[2]).value])
        else:
            of_call = CudaCall.from_address(arguments[0]).rules
            seen.append([of_call.documents, of_call.extents, of_call.extent_rows - 1])

    before, follow = follow, keep
    q, k = (torch.randn(2, 1, n, 8) for n in (5, 300))
    documents = torch.arange(300).repeat(2, 1) // 7
    operators.flash_ruled(q, k, k, True, None, None, *Rules(right=0, documents=documents).arguments())
    follow = before
    assert len(seen) == 2 and seen[0] == seen[1] and seen[0][::2] == [documents.data_ptr(), 300], seen


def reason(operators: Any, q: torch.Tensor, k: torch.Tensor) -> type:
    """The type of the error behind the launcher's."""
    try:
        operators.flash(q, k, k, False, None, "2")
    except RuntimeError as error:
        try:
            operators.raise_reason(error)
        except Exception as behind:
            return type(behind)
    return RuntimeError


def check_rules(operators: Any) -> None:
    """A bias that heads share and a user's header reach the kernel; a saved header is planned anew."""
    global running
    running = chosen("5", 32, Dtype.FP32, 40)
    q, k, v = (torch.randn(2, 3, n, 32) for n in (40, 50, 50))
    header = Path(tempfile.mkdtemp()) / "mine.h"
    biases = torch.randn(2, 1, 40, 50), torch.randn(1, 3, 1, 50).expand(1, 3, 40, 50)
    for number, bias in enumerate(2 * biases):
        header.write_text(f"float score(float s, At at) {{ return {number} * s + at.h; }}")
        rules = checked({"bias": bias, "score_mod": header}, q, 50)
        for _ in range(2):
            got = operators.flash_ruled(q, k, v, False, 0.2, "5", *rules.on_cuda().arguments())
        about: dict[str, Any] = dict(causal=False, scale=0.2, return_lse=True, rules=rules)
        torch.testing.assert_close(got, reference.attention(q, k, v, **about), rtol=1e-5, atol=1e-5)
        assert len(planned) == number + 1 and planned[-1][1] is rules.score_mod
        assert planned[-1][0] & RULES["MODIFIED"] and planned[-1][0] & RULES["BIAS_ADDS"]


def main() -> None:
    operators = loaded()
    check_rules(operators)
    wide = torch.randn(1, 1, 4, 257)
    long = torch.zeros(1).expand(1, 2**15, 2**30, 8)  # it takes four bytes, its copy a pebibyte
    assert reason(operators, wide, wide) is ValueError
    assert reason(operators, long, long[:, :, :1]) is torch.OutOfMemoryError
    assert reason(operators, wide, wide[..., :4]) is RuntimeError
    calls = 0
    check_documents(operators)
    try:
        for kernel in KERNELS.values():
            for dtype in kernel.dtypes:
                for shape in ((1, 2, 3, 700, 33), (3, 1, 200, 200, 80)):
                    for causal in (False, True):
                        calls += check(operators, kernel, dtype, shape, causal)
    except RuntimeError as error:
        raise (wrong or [error])[-1] from None
    with ThreadPoolExecutor(1) as new:  # a thread without a context
        new.submit(check, operators, KERNELS["2"], Dtype.FP32, (1, 1, 9, 9, 8), True).result()
    print(f"{calls} calls")


if __name__ == "__main__":
    sys.exit(main())
