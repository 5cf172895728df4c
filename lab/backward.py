"""The lab's test of a part's gradients: their error beside PyTorch's and their time beside SDPA's.

On CUDA the time is the GPU's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.attention_ext import PARTS, attention, extension, reference
from shakespeare.attention_ext.cuda import gpu as driver
from shakespeare.attention_ext.cuda.kernels import GRADIENT, choose
from shakespeare.attention_ext.parts import Dtype, check_compatible, resolve_simd
from shakespeare.lab import correctness, machine
from shakespeare.lab.cuda import gpu
from shakespeare.lab.timing import in_turns

PRODUCTS = 5  # S, dP, dV, dK and dQ, each of 2 d operations for a query and a key
FLOOR = 1e-6  # allowed error of any float32 result, as a share of the largest gradient
ROUNDING = 2.0**-23  # the same for a sum of one term; for d terms it grows with the root of d
LEAST_SECONDS = 0.02  # least time of a measurement
# Two results may be rounded to neighbours in 16 bits, which are so far apart, as a share of the largest.
NEIGHBOURS = {Dtype.FP32: 0.0, Dtype.BF16: 2.0**-8, Dtype.FP16: 2.0**-11}


@dataclass(frozen=True)
class Shape:
    """The sizes of a test: B batches of H heads, N queries and keys of width d; device: cpu or cuda."""

    B: int
    H: int
    N: int
    d: int
    causal: bool
    device: str = "cpu"
    dtype: str = Dtype.FP32

    @property
    def operations(self) -> int:
        """Floating-point operations of a backward pass, without masked scores."""
        pairs = self.N * (self.N + 1) // 2 if self.causal else self.N**2
        return PRODUCTS * 2 * self.B * self.H * self.d * pairs


class Error(NamedTuple):
    """The largest error of a part's gradient for one input, that of PyTorch's, and the allowed one."""

    name: str
    part: float
    pytorch: float
    allowed: float


def normal(shape: Shape) -> list[Tensor]:
    """q, k, v and dout, each (B, H, N, d): normal numbers in the layout (B, N, H, d)."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.B, shape.N, shape.H, shape.d)
    kind = getattr(torch, Dtype(shape.dtype).torch_name)
    numbers = (torch.randn(size, generator=generator) for _ in range(4))
    return [t.to(shape.device, kind).transpose(1, 2) for t in numbers]


def backward_of(forward: Callable[..., Tensor], tensors: Sequence[Tensor], dout: Tensor) -> Callable[[], Any]:
    """A function that computes the gradients of q, k and v from dout at each call."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def exact(tensors: Sequence[Tensor], causal: bool) -> tuple[Tensor, ...]:
    """The gradients of q, k and v in float64. tensors: these, and dout."""
    q, k, v, dout = (t.double() for t in tensors)
    options: dict = dict(causal=causal, scale=q.shape[3] ** -0.5, br=256, bc=256)
    out, lse = reference.flash_attention(q, k, v, **options)
    return reference.flash_attention_backward(q, k, v, out, lse, dout, **options)


def errors(
    both: Sequence[Callable[[], Any]], shape: Shape, tensors: Sequence[Tensor], dout: Tensor
) -> list[Error]:
    """The errors of dq, dk and dv. Allowed: twice PyTorch's, and a share that grows with sqrt(d)."""
    right = exact([*tensors, dout], shape.causal)
    floor, compared = max(FLOOR, ROUNDING * math.sqrt(shape.d)) + NEIGHBOURS[Dtype(shape.dtype)], []
    for name, right, *got in zip(("dq", "dk", "dv"), right, *(backward() for backward in both)):
        of_part, of_pytorch = (float((gradient - right).abs().max()) for gradient in got)
        allowed = 2 * of_pytorch + floor * float(right.abs().max())
        compared.append(Error(name, of_part, of_pytorch, allowed))
    return compared


def run(
    part: str,
    shape: Shape,
    simd: str = "auto",
    kernel: str | None = None,
    echo: Callable[[str], None] = print,
    rounds: int = 9,
) -> bool:
    """Test a part's gradients on normal numbers and time them; False if one is wrong.

    Raises ValueError if the part has no gradient there, or part0's N x N matrices would not fit the memory,
    BuildError without a GPU for device cuda.
    """
    check_compatible(part, shape.device, shape.dtype, gradient=True)
    on = gpu.Gpu() if shape.device == "cuda" else None
    correctness.heads_at_once(shape.N, shape.B * shape.H, on.free() if on else machine.available_memory())
    echo(f"Running {part} backward test: {PARTS[part].title}\n")
    if on and PARTS[part].operator:
        row, _ = choose(kernel or GRADIENT, shape.d, Dtype(shape.dtype), driver.gpu(on.device.index))
        echo(f"{on.describe()['name']}\nkernel {row.name}: {row.summary}\n")
    elif PARTS[part].operator:
        forward_only = " in the forward pass; portable in the backward pass"
        echo(extension.describe(simd) + forward_only * (resolve_simd(simd) != "portable") + "\n")
    *tensors, dout = normal(shape)
    forward = partial(attention, part, causal=shape.causal, simd=simd, kernel=kernel)
    forwards = forward, partial(F.scaled_dot_product_attention, is_causal=shape.causal)
    both = [backward_of(each, tensors, dout) for each in forwards]
    compared = errors(both, shape, tensors, dout)
    for name, ours, pytorchs, allowed in compared:
        echo(f"{name}: largest error {ours:.2e}, PyTorch's {pytorchs:.2e}, allowed {allowed:.2e}")
    passed = all(error.part <= error.allowed for error in compared)  # NaN is not
    echo(f"manual gradients == float64 gradients {passed}\n")
    if not passed:
        return False
    first, second = in_turns(both, rounds, LEAST_SECONDS, on)
    ours, sdpa, rate = first.median, second.median, shape.operations / first.median
    if on:
        echo(f"{part} backward time:  {1e3 * ours:.3f}ms, {rate / 1e12:.1f} TFLOP/s")
    else:
        speed = f"{rate / 1e9:.1f} GFLOP/s, {rate / machine.fma_peak(threads=torch.get_num_threads()):.0%}"
        echo(f"{part} backward time:  {1e3 * ours:.3f}ms, {speed} of the FMA peak")
        echo(f"quiet samples:       {first.quiet}; all take {first.disturbance:.2f} times as long")
    echo(f"SDPA backward time:  {1e3 * sdpa:.3f}ms")
    echo(f"speed-up over SDPA:  {sdpa / ours:.2f}x")
    return True
