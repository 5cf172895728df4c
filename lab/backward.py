"""The lab's test of a part's gradients: their error beside PyTorch's and their time beside SDPA's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shakespeare.attention_ext import PARTS, attention, extension, reference
from shakespeare.attention_ext.parts import check_part, resolve_simd, with_gradient
from shakespeare.lab import correctness, machine
from shakespeare.lab.timing import in_turns

PRODUCTS = 5  # S, dP, dV, dK and dQ, each of 2 d operations for a query and a key
FLOOR = 1e-6  # allowed error of any float32 result, as a share of the largest gradient
ROUNDING = 2.0**-23  # the same for a sum of one term; for d terms it grows with the root of d
LEAST_SECONDS = 0.02  # least time of a measurement

Backward = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    """The sizes of a test: B batches of H heads, N queries and keys of width d."""

    B: int
    H: int
    N: int
    d: int
    causal: bool

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

    @property
    def passed(self) -> bool:
        """Whether the part's error is allowed; NaN is not."""
        return self.part <= self.allowed


def normal(shape: Shape) -> list[Tensor]:
    """q, k, v and dout, each (B, H, N, d): normal numbers in the layout (B, N, H, d)."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.B, shape.N, shape.H, shape.d)
    return [torch.randn(size, generator=generator).transpose(1, 2) for _ in range(4)]


def backward_of(forward: Callable[..., Tensor], tensors: Sequence[Tensor], dout: Tensor) -> Backward:
    """A function that computes the gradients of q, k and v from dout at each call."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def contenders(
    part: str, shape: Shape, tensors: Sequence[Tensor], dout: Tensor, simd: str = "auto"
) -> tuple[Backward, Backward]:
    """The backward passes of a part and of PyTorch's scaled_dot_product_attention."""
    ours = partial(attention, part, causal=shape.causal, simd=simd)
    sdpa = partial(F.scaled_dot_product_attention, is_causal=shape.causal)
    return backward_of(ours, tensors, dout), backward_of(sdpa, tensors, dout)


def errors(both: Sequence[Backward], shape: Shape, tensors: Sequence[Tensor], dout: Tensor) -> list[Error]:
    """The errors of dq, dk and dv. Allowed: twice PyTorch's, and a share that grows with sqrt(d)."""
    q, k, v = (t.double() for t in tensors)
    options: dict = dict(causal=shape.causal, scale=shape.d**-0.5, br=256, bc=256)
    out, lse = reference.flash_attention(q, k, v, **options)
    exact = reference.flash_attention_backward(q, k, v, out, lse, dout.double(), **options)
    floor, compared = max(FLOOR, ROUNDING * math.sqrt(shape.d)), []
    for name, right, *got in zip(("dq", "dk", "dv"), exact, *(backward() for backward in both)):
        of_part, of_pytorch = (float((gradient - right).abs().max()) for gradient in got)
        allowed = 2 * of_pytorch + floor * float(right.abs().max())
        compared.append(Error(name, of_part, of_pytorch, allowed))
    return compared


def run(
    part: str, shape: Shape, simd: str = "auto", echo: Callable[[str], None] = print, rounds: int = 9
) -> bool:
    """Test a part's gradients on normal numbers and time them; False if one is wrong.

    Raises ValueError if the part has no gradient, or part0's N x N matrices would not fit the memory.
    """
    if check_part(part).name not in with_gradient():
        raise ValueError(f"part is {part!r}; it must be one with a gradient: {', '.join(with_gradient())}")
    correctness.heads_at_once(shape.N, shape.B * shape.H, machine.available_memory())
    echo(f"Running {part} backward test: {PARTS[part].title}\n")
    if PARTS[part].operator:
        forward_only = " in the forward pass; portable in the backward pass"
        echo(extension.describe(simd) + forward_only * (resolve_simd(simd) != "portable") + "\n")
    *tensors, dout = normal(shape)
    both = contenders(part, shape, tensors, dout, simd)
    compared = errors(both, shape, tensors, dout)
    for name, ours, pytorchs, allowed in compared:
        echo(f"{name}: largest error {ours:.2e}, PyTorch's {pytorchs:.2e}, allowed {allowed:.2e}")
    passed = all(error.passed for error in compared)
    echo(f"manual gradients == float64 gradients {passed}\n")
    if not passed:
        return False
    samples = in_turns(both, rounds, LEAST_SECONDS)
    ours, sdpa = (of.median for of in samples)
    rate = shape.operations / ours
    share = rate / machine.fma_peak(threads=torch.get_num_threads())
    echo(f"{part} backward time:  {1e3 * ours:.3f}ms, {rate / 1e9:.1f} GFLOP/s, {share:.0%} of the FMA peak")
    echo(f"quiet samples:       {samples[0].quiet}; all take {samples[0].disturbance:.2f} times as long")
    echo(f"SDPA backward time:  {1e3 * sdpa:.3f}ms")
    echo(f"speed-up over SDPA:  {sdpa / ours:.2f}x")
    return True
