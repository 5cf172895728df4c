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
from shakespeare.attention_ext import rules as ruling
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.cuda import gpu as driver
from shakespeare.attention_ext.cuda.kernels import KERNELS, Gpu, Kernel, choose
from shakespeare.attention_ext.cuda.tiles import Queries
from shakespeare.attention_ext.parts import Dtype
from shakespeare.own.kernel import CudaCall

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
    return current ? launched(function, arguments) : 201;
}
int cuMemsetD32Async(unsigned* at, unsigned value, size_t count, void* stream) { return 0; }
int aoti_torch_get_current_cuda_stream(int index, void** stream) { return *stream = (void*)STREAM, 0; }
int aoti_torch_create_cuda_guard(int index, void** guard) { return *guard = 0, 0; }
int aoti_torch_delete_cuda_guard(void* guard) { return 0; }
"""


class RuledCall(ctypes.Structure):
    """struct Call of csrc/cuda/call.h with RULES."""

    _fields_ = [
        ("call", CudaCall),
        *((name, ctypes.c_void_p) for name in ("slopes", "sinks", "documents", "extents")),
        *((name, ctypes.c_int) for name in ("left", "right", "group")),
        *((name, ctypes.c_float) for name in ("softcap", "softcap_below")),
    ]

    def rules(self) -> ruling.Rules:
        """The rules that a kernel would follow."""
        B, H, Nq, Nk = (getattr(self.call, name) for name in ("batches", "heads", "Nq", "Nk"))
        softcap = self.softcap * math.log(2)
        assert math.isclose(self.softcap_below * self.softcap, 1, rel_tol=1e-6)
        slopes = matrices(self.slopes, (H, 1), (B, H), torch.float32)
        documents = matrices(self.documents, (Nk, 1), (B, Nk), torch.int64)
        blocks = -(-Nq // 16)
        extents = matrices(self.extents, (4 * blocks, 4, 1), (B, blocks, 4), torch.int32)
        torch.testing.assert_close(extents, ruling.extents(documents, Nq))
        sinks = matrices(self.sinks, (1,), (H,), torch.float32)
        return ruling.Rules(self.left, self.right, softcap, slopes, sinks, None, documents)


LAUNCHED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
ON = Gpu("A GPU", (9, 0), 227 * 1024, 4)
running: driver.Compiled  # what the next launches must be of
asked: list[str | None] = []  # the kernels that the launcher has asked Python for
wrong: list[BaseException] = []  # what a launch raised
dtype_of_call, ruled = torch.float32, False  # of this call


def matrices(at: int, strides: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    extent = 1 + sum(stride * (n - 1) for stride, n in zip(strides, shape))
    data = (ctypes.c_char * (extent * dtype.itemsize)).from_address(at)
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, strides)


def follow(function: int, arguments: Any, dtype: torch.dtype) -> None:
    """Compute attention at the last launch of a call."""
    with_rules = RuledCall.from_address(arguments[3 if "BOX" in running.tile.sizes else 0])
    call, group = with_rules.call, with_rules.group if ruled else 1
    last = function == len(running.row.functions)
    if running.row.name == "1":  # a launch for each tile of keys
        last = ctypes.c_int.from_address(arguments[2]).value + running.tile.bc >= call.Nk
    if not last:
        return
    found = read(call, group, dtype)
    rules = with_rules.rules() if ruled else None
    causal = bool(call.causal) and not ruled  # a rule has it on its right
    scale = call.scale * math.log(2)
    out, lse = reference.attention(*found, causal=causal, scale=scale, return_lse=True, rules=rules)
    contiguous = torch.empty(out.shape).stride()
    matrices(call.out, contiguous, out.shape, dtype).copy_(out)
    if call.lse:
        matrices(call.lse, lse.contiguous().stride(), lse.shape, torch.float32).copy_(lse)


def read(call: CudaCall, group: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v of a call, as a kernel would read them."""
    found, row = [], running.row
    for name in "qkv":
        s = getattr(call, f"{name}_strides")
        n, heads = (call.Nq, call.heads) if name == "q" else (call.Nk, call.heads // group)
        strides, shape = (s.batch, s.head, s.row, 1), (call.batches, heads, n, running.width)
        address = getattr(call, name)
        if row.vectors:
            used = [stride for stride, entries in zip(strides, shape[:3]) if entries > 1]
            assert not any(each * dtype.itemsize % 16 for each in used) and address % 16 == 0
        found.append(matrices(address, strides, shape, dtype).float())
    return found


def all_rules(q: torch.Tensor, Nk: int, **given: Any) -> ruling.Rules:
    documents = torch.arange(len(q) * Nk).view(-1, Nk) // 150
    given |= dict(softcap=2.0, alibi_slopes=torch.rand(q.shape[1]), documents=documents)
    return ruling.checked(given, q, Nk)


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
    from shakespeare.attention_ext.cuda import operators

    return operators


def compiled(kernel, call, d, dtype, index, rules=0) -> driver.Compiled:
    asked.append(kernel)
    assert rules == (15 if ruled else 0)
    return chosen(kernel, d, dtype, call.Nq * call.group)


def chosen(kernel: str | None, d: int, dtype: Dtype, Nq: int) -> driver.Compiled:
    row, tile = choose(kernel, d, dtype, ON, Queries(Nq), 15 if ruled else 0)
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


def inputs(shape: tuple[int, ...], dtype: torch.dtype, group: int = 1) -> list[list[torch.Tensor]]:
    """Tensors of these shapes, with all kinds of strides."""
    B, H, Nq, Nk, d = shape
    q, k, v = (torch.randn(B, h, n, d).to(dtype) for h, n in ((H, Nq), (H // group, Nk), (H // group, Nk)))
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


def check(operators: Any, kernel: Kernel, dtype: Dtype, shape: tuple[int, ...], causal: bool, group=1) -> int:
    """Call a kernel with all kinds of strides and, for a group, all rules; compare with part0.

    Returns the number of calls.
    """
    global running, dtype_of_call, ruled
    *_, Nq, Nk, d = shape
    dtype_of_call, ruled = getattr(torch, dtype.torch_name), group > 1
    running = chosen(kernel.name, d, dtype, Nq * group)
    before, cases, rules = len(asked), inputs(shape, dtype_of_call, group), None
    for q, k, v in cases:
        if ruled:
            rules = all_rules(q, Nk, window=(300, 9), sinks=torch.randn(q.shape[1]))
        forward = operators.flash_ruled if ruled else operators.flash_with_lse
        out, lse = forward(q, k, v, causal, None, kernel.name, *(rules.on_cuda(Nq) if rules else ()))
        assert out.is_contiguous() and out.shape == q.shape
        expected = reference.attention(q, k, v, causal=causal, scale=d**-0.5, return_lse=True, rules=rules)
        close = 1e-2 if dtype is not Dtype.FP32 else 1e-4 if ruled else 1e-5
        torch.testing.assert_close((out, lse), expected, rtol=close, atol=close)
        assert ruled or torch.equal(out, operators.flash(q, k, v, causal, d**-0.5, kernel.name))
    assert ruled or len(asked) <= before + 1, "Python was asked twice for the same sizes"
    calls = len(cases) * (1 if ruled else 2)
    ruled = False
    return calls


def main() -> None:
    operators = loaded()
    calls = 0
    try:
        for kernel in KERNELS.values():
            for dtype in kernel.dtypes:
                for shape in ((1, 2, 3, 700, 33), (3, 1, 200, 200, 80)):
                    for causal in (False, True):
                        calls += check(operators, kernel, dtype, shape, causal)
                        if kernel.ruled and shape[0] == 3:
                            few = (2, 6, 40 if causal else 1, 700, 33)
                            calls += check(operators, kernel, dtype, few, causal, 3)
    except RuntimeError as error:
        raise (wrong or [error])[-1] from None
    with ThreadPoolExecutor(1) as new:  # a thread without a context
        new.submit(check, operators, KERNELS["2"], Dtype.FP32, (1, 1, 9, 9, 8), True).result()
    print(f"{calls} calls")


if __name__ == "__main__":
    sys.exit(main())
