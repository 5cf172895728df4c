"""Part 4 through WebGPU: attention(), what its arrays must be, and the call."""

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext import rules as ruling
from shakespeare.attention_ext.checks import check_shapes, finite, none_is_default, truth, type_text
from shakespeare.attention_ext.parts import PARTS, Dtype, check_compatible
from shakespeare.attention_ext.webgpu.driver import LOCK, Gpu, Lost, grid, opened
from shakespeare.attention_ext.webgpu.steps import WIDEST, ceil_div, choose

PART = PARTS["part4"]
DTYPES = PART.dtypes["webgpu"]
# Multiply-adds of a dispatch. Systems end one that takes seconds, and reset the GPU.
AT_ONCE = {"DiscreteGPU": 2**39}  # others: 2**33


class Call:
    """A call whose arrays are on the GPU.

    q: (B, H, Nq, d). k, v: (B, H, Nk, d); all contiguous, of one of DTYPES. Raises ValueError for a kernel
    that the adapter does not take, BuildError for arrays that do not fit.
    """

    def __init__(
        self, gpu: Gpu, arrays: list[NDArray[Any]], causal: bool, scale: float, kernel: str | None
    ) -> None:
        q, k, _ = arrays
        B, H, Nq, d = q.shape
        Nk = k.shape[2]
        self.shape = q.shape
        self.gpu = gpu
        self.dtype = q.dtype
        self.step, self.tile = choose(kernel, d, Dtype.parse(q.dtype), gpu.adapter)
        self.pipeline = gpu.pipeline(self.step.source(d, Dtype.parse(q.dtype), self.tile))
        self.padded = 4 * ceil_div(d, 4)
        self.rows = B * H * Nq
        buffers = [gpu.buffer(_padded(array, self.padded)) for array in arrays]
        self.out = gpu.buffer(self.rows * self.padded * q.itemsize)
        self.lse = gpu.buffer(4 * self.rows)
        groups = B * H * ceil_div(Nq, self.tile.br)
        limit = max(1, AT_ONCE.get(gpu.adapter.kind, 2**33) // (self.tile.br * Nk * 2 * self.padded))
        self.dispatches = []
        for first in range(0, groups, limit):
            call = np.array([B * H, Nq, Nk, causal, first, 0], np.uint32)
            call[5:] = np.float32(scale * math.log2(math.e)).view(np.uint32)
            bound = [*buffers, self.out, self.lse, gpu.buffer(call, uniform=True)]
            self.dispatches.append((bound, grid(min(limit, groups - first))))

    def launch(self) -> None:
        """Compute, without waiting."""
        for bound, groups in self.dispatches:
            self.gpu.run(self.pipeline, bound, groups)

    def wait(self) -> None:
        """Wait for all launches."""
        self.gpu.read(self.lse, np.float32, 1)

    def read(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The output (B, H, Nq, d) and the logsumexp (B, H, Nq) of the last launch."""
        out = self.gpu.read(self.out, self.dtype, self.rows * self.padded)
        out = out.reshape(*self.shape[:3], self.padded)[..., : self.shape[3]]
        lse = self.gpu.read(self.lse, np.float32, self.rows).reshape(self.shape[:3])
        return np.require(out, requirements=["C", "W"]), np.require(lse, requirements=["C", "W"])


def _padded(array: NDArray[Any], width: int) -> NDArray[Any]:
    """The array with zeros at the end of its rows."""
    more = width - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)]) if more else array


def arrays_of(q: Any, k: Any, v: Any, causal: bool) -> list[NDArray[Any]]:
    """The three as contiguous arrays, not copied if possible. Raises TypeError or ValueError naming one."""
    torch: Any = sys.modules.get("torch")
    arrays: list[NDArray[Any]] = []
    for name, t in (("q", q), ("k", k), ("v", v)):
        tensor = torch is not None and isinstance(t, torch.Tensor)
        if not tensor and not isinstance(t, np.ndarray):
            raise TypeError(f"{name} is {type_text(t)}; it must be a NumPy array or a tensor")
        if type(t) is not type(q):
            raise TypeError(f"{name} is {type_text(t)}; it must be as q is, {type_text(q)}")
        if tensor and t.device.type != "cpu":
            raise ValueError(f"{name} is on {t.device}; it must be on the CPU")
        if str(t.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(f"{name} is {t.dtype}; it must be {' or '.join(DTYPES)} on WebGPU")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}; it must be q's {q.dtype}")
        arrays.append(t.detach().numpy() if tensor else t)
    if tensor and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        check_compatible(PART, "webgpu", gradient=True)
    check_shapes(q, k, v, causal)
    if q.shape[3] > WIDEST:
        raise ValueError(f"q has d={q.shape[3]}; it must be at most {WIDEST} on WebGPU")
    return [np.ascontiguousarray(array) for array in arrays]


@none_is_default
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
    **rules: Any,
) -> Any:
    """softmax(scale * q k^T) v by part 4 on any GPU, through the package wgpu and without PyTorch.

    q: (B, H, Nq, d). k, v: (B, H, Nk, d). NumPy arrays, or tensors on the CPU, in float32 or float16, with d
    at most 256. kernel: a step of webgpu.steps.STEPS by its name; None takes the adapter's fastest. The other
    arguments, the errors and the results, of q's kind, are attention_ext.attention()'s; also raises
    BuildError without an adapter. It computes no gradients and takes no rules. After a lost device, another
    one computes.
    """
    check_compatible(PART, "webgpu", rules=tuple(ruling.named(rules)))
    causal = truth("causal", causal)
    return_lse = truth("return_lse", return_lse)
    arrays = arrays_of(q, k, v, causal)
    applied = 1 / math.sqrt(q.shape[3]) if scale is None else finite("scale", scale)
    with LOCK:
        try:
            results = _attend(opened(), arrays, causal, applied, kernel)
        except Lost:
            results = _attend(opened(), arrays, causal, applied, kernel)
    if not isinstance(q, np.ndarray):
        results = [sys.modules["torch"].from_numpy(array) for array in results]
    return tuple(results) if return_lse else results[0]


def _attend(
    gpu: Gpu, arrays: list[NDArray[Any]], causal: bool, scale: float, kernel: str | None
) -> list[NDArray[Any]]:
    """The output and the logsumexp, by as many heads at once as fit a buffer."""
    B, H, Nq, d = arrays[0].shape
    size = 4 * ceil_div(d, 4) * arrays[0].itemsize * max(Nq, arrays[1].shape[2])  # bytes of a head
    limit = max(1, gpu.adapter.limits["max-storage-buffer-binding-size"] // size)
    flat = [array.reshape(1, B * H, *array.shape[2:]) for array in arrays]
    parts = []
    for h in range(0, B * H, limit):
        call = Call(gpu, [array[:, h : h + limit] for array in flat], causal, scale, kernel)
        call.launch()
        parts.append(call.read())
    outs, lses = zip(*parts)
    joined = [np.concatenate(arrays, axis=1) if len(parts) > 1 else arrays[0] for arrays in (outs, lses)]
    return [joined[0].reshape(B, H, Nq, d), joined[1].reshape(B, H, Nq)]
