"""Compares calls of part 4 without PyTorch with the launcher's: python calls_process.py

Both prepare the same calls over a stand-in for CUDA's driver, launcher_process.py's. Prints how many numbers
of the kernels' arguments are equal.
"""

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import launcher_process
import numpy as np
import torch

from shakespeare.attention_ext import rules
from shakespeare.attention_ext.cuda import calls, driver
from shakespeare.attention_ext.cuda.launches import Sizes
from shakespeare.attention_ext.parts import Dtype

# dtype, B, T, H, d, and the window of an endless model
CASES = (
    (Dtype.BF16, 4, 128, 4, 32, None),
    (Dtype.FP32, 3, 16, 2, 16, None),
    (Dtype.FP32, 2, 70, 2, 32, 20),
    (Dtype.BF16, 2, 70, 2, 64, 20),
    (Dtype.BF16, 1, 300, 2, 64, 500),
)
OWN = ("out", "lse", "rows", "dq", "dk", "dv", "rules.slopes")  # addresses that each has of its own
seen: list[list[Any]] = []  # the arguments of launches
structs: dict[int, type] = {}  # of the arguments that are compared, by place


def copied(address: int, struct: type) -> dict[str, Any]:
    """The numbers of a struct by name."""
    return numbers(struct.from_buffer_copy((ctypes.c_char * ctypes.sizeof(struct)).from_address(address)))


def numbers(struct: Any) -> dict[str, Any]:
    found = {}
    for name, _ in struct._fields_:
        value = getattr(struct, name)
        inner = numbers(value) if hasattr(value, "_fields_") else {"": value}
        found.update({f"{name}.{each}".strip("."): number for each, number in inner.items()})
    return found


def keep(arguments: Any) -> None:
    seen.append([copied(arguments[place], struct) for place, struct in structs.items()])


class Memory:
    """That of this process."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.address = self.bytes.ctypes.data

    def clear_async(self, stream: Any) -> None:
        pass


def main() -> None:
    operators = launcher_process.loaded()
    launcher_process.follow = lambda function, arguments, dtype: keep(arguments)
    driver.Memory = Memory
    driver.prepared_launch = lambda *_, **__: SimpleNamespace()
    driver.launch_prepared = lambda config, function, pointers: keep(pointers)
    calls.Attention._map = lambda *_: SimpleNamespace(getPtr=lambda: 0)
    compared = 0
    for dtype, B, T, H, d, window in CASES:
        C = H * d
        qkv, dout = (torch.randn(B * T, n).to(getattr(torch, dtype.torch_name)) for n in (3 * C, C))
        q, k, v = qkv.view(B, T, 3, H, d).permute(2, 0, 3, 1, 4)
        heads = dout.view(B, T, H, d).transpose(1, 2)
        slopes = torch.rand(H)
        tiled = slopes.repeat(B)
        call = (q, k, v, True, 1 / math.sqrt(d), None)
        given = operators.NO_RULES
        endless = {}
        if window:
            checked = rules.checked({"window": (window - 1, 0), "alibi_slopes": slopes}, q, T)
            given = checked.on_cuda().arguments()
            endless = {"window": window, "slopes": tiled.data_ptr()}
        own = calls.Attention((B, H, T, d), dtype, 0, None, **endless)
        row = launcher_process.chosen(None, d, dtype, T)
        boxes = row.row.plan(row, Sizes(B * H, T, T, uneven=True)).box
        structs.clear()
        structs[3 if boxes else 0] = calls.Call
        out, lse = operators.flash_ruled(*call, *given) if window else operators.flash_with_lse(*call)
        theirs = seen[-1]
        strides = (3 * C * T, d, 3 * C)
        own_qkv = [calls.Matrices(qkv.data_ptr() + i * C * dtype.bytes, strides) for i in range(3)]
        results = out.data_ptr(), lse.data_ptr()
        own.forward(*own_qkv, *results)
        mine = seen[-1]
        structs.clear()
        structs.update({0: calls.Call, 1: calls.Gradients})
        operators.flash_backward(heads, None, q, k, v, out, lse, *call[3:], False, *given)
        theirs += seen[-1]
        own.backward(calls.Matrices(dout.data_ptr(), (C * T, d, C)), *own_qkv, *results, 1, 2, 3)
        mine += seen[-1]
        for right, got in zip(theirs, mine, strict=True):
            for name, number in right.items():
                assert name in OWN or got[name] == number, (dtype, T, window, name, number, got[name])
                compared += 1
    assert not launcher_process.wrong, launcher_process.wrong[0]
    print(compared, "numbers are equal")


if __name__ == "__main__":
    main()
