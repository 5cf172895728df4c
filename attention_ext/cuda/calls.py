"""Part 4 on CUDA without PyTorch: self-attention and its gradients over addresses, for a CUDA graph."""

from __future__ import annotations

import ctypes
import math
from ctypes import Structure
from dataclasses import dataclass
from typing import Any

from shakespeare.attention_ext.build.nvrtc import SOURCES
from shakespeare.attention_ext.build.structs import structure
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import GRADIENT
from shakespeare.attention_ext.cuda.launches import RULES, Sizes
from shakespeare.attention_ext.parts import Dtype

HEADER = SOURCES / "arguments.h"
Call, Gradients, Rules, Strides = (
    structure(HEADER, name) for name in ("Call", "Gradients", "Rules", "Strides")
)
WINDOW_AND_ALIBI = RULES["RULED"] + RULES["ALIBI"]


@dataclass(frozen=True)
class Matrices:
    """Where (B, H, T, d) begin, and the elements from one batch, head and row to the next."""

    address: int
    strides: tuple[int, int, int]


class Attention:
    """Causal attention of T queries to T keys, by the current context's GPU, as launches on a stream.

    shape: (B, H, T, d), d a multiple of 8. window: keys that a query sees, itself among them, and slopes: the
    address of ALiBi's (B, H) float32; or neither. Rows begin at multiples of 16 bytes; what a call writes is
    contiguous, in this dtype but for lse, (B, H, T) float32. Raises as driver.compiled() does.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: Dtype,
        index: int,
        stream: Any,
        window: int | None = None,
        slopes: int = 0,
    ) -> None:
        self.shape = shape
        B, H, T, d = shape
        self.dtype = dtype
        self.stream = stream
        left = T if window is None else min(window - 1, T)
        ruled = window is not None
        self.rules = Rules(slopes=slopes, left=left, group=1, softcap_below=math.inf) if ruled else Rules()
        self.causal = left >= T
        self.plans = {}
        for kernel, seen in ((None, min(T, left + T)), (GRADIENT, T)):
            call = Sizes(B * H, T, seen, uneven=True)
            chosen = driver.compiled(kernel, call, d, dtype, index, WINDOW_AND_ALIBI * ruled)
            plan = chosen.row.plan(chosen, call)
            self.plans[kernel] = plan, driver.Memory(max(4 * plan.scratch, 4))

    def forward(self, q: Matrices, k: Matrices, v: Matrices, out: int, lse: int) -> None:
        """Write the output and the rows' logsumexp to these addresses."""
        plan, memory = self.plans[None]
        call = self._call(q, k, v, out, lse)
        scratch = ctypes.c_void_p(memory.address)
        number = ctypes.c_int(plan.number)
        if plan.box:
            maps = [self._map(q, plan.br, plan), *(self._map(m, plan.bc, plan) for m in (k, v))]
            if plan.scratch:
                memory.clear_async(self.stream)
            return self._launch(plan, [*(m.getPtr() for m in maps), *_at(call, scratch)])
        for _ in range(plan.repeats):
            self._launch(plan, _at(call, scratch, number))
            number.value += plan.step

    def backward(
        self,
        dout: Matrices,
        q: Matrices,
        k: Matrices,
        v: Matrices,
        out: int,
        lse: int,
        dq: int,
        dk: int,
        dv: int,
    ) -> None:
        """Write the gradients of q, k and v, from what forward() wrote, to these addresses."""
        plan, memory = self.plans[GRADIENT]
        call = self._call(q, k, v, out, lse)
        to = Gradients(dout.address, Strides(*dout.strides), None, memory.address, dq, dk, dv)
        maps = [self._map(m, plan.br, plan) for m in (q, k, v, dout)] if plan.box else []
        self._launch(plan, [*_at(call, to), *(m.getPtr() for m in maps)])

    def _call(self, q: Matrices, k: Matrices, v: Matrices, out: int, lse: int) -> Structure:
        B, H, T, d = self.shape
        strides = (Strides(*each) for each in (q.strides, k.strides, v.strides, (H * T * d, T * d, d)))
        scale = 1 / (math.sqrt(d) * math.log(2))
        addresses = q.address, k.address, v.address, out, lse
        return Call(*addresses, *strides, B, H, T, T, self.causal, scale, self.rules)

    def _map(self, m: Matrices, rows: int, plan: Structure) -> Any:
        """The tensor map of matrices, for the copy engine, which takes `rows` of them at a time."""
        cuda = driver.bindings()
        B, H, T, _ = self.shape
        sizes = [cuda.cuuint64_t(n) for n in (plan.width, T, H, B)]
        batch, head, row = m.strides
        strides = [cuda.cuuint64_t(2 * n) for n in (row, head, batch)]
        box = [cuda.cuuint32_t(n) for n in (plan.box, rows, 1, 1)]
        steps = [cuda.cuuint32_t(1)] * 4
        kind = "BFLOAT16" if self.dtype is Dtype.BF16 else "FLOAT16"
        swizzle = f"SWIZZLE_{128 if plan.box == 64 else 64}B"
        known = (
            getattr(getattr(cuda, f"CUtensorMap{group}"), f"CU_TENSOR_MAP_{name}")
            for group, name in (
                ("Interleave", "INTERLEAVE_NONE"),
                ("Swizzle", swizzle),
                ("L2promotion", "L2_PROMOTION_L2_256B"),
                ("FloatOOBfill", "FLOAT_OOB_FILL_NONE"),
            )
        )
        dtype = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")
        made = cuda.cuTensorMapEncodeTiled(dtype, 4, m.address, sizes, strides, box, steps, *known)
        return driver.checked(made)

    def _launch(self, plan: Structure, addresses: list[int]) -> None:
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        for launch in plan.launches[: plan.count]:
            early = bool(launch.early)
            config = driver.prepared_launch(launch.blocks, launch.x, launch.shared, self.stream, early=early)
            config.blockDimY = launch.y
            driver.launch_prepared(config, launch.function, pointers)


def _at(*arguments: Any) -> list[int]:
    return [ctypes.addressof(argument) for argument in arguments]
