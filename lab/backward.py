"""The lab's test of a part's gradients: their error beside PyTorch's and their time beside SDPA's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_ext import PARTS, attention, extension, reference
from attention_ext.parts import check_part, with_gradient
from lab import correctness, machine

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
        """Floating-point operations of a backward pass, without the scores that a mask hides."""
        pairs = self.N * (self.N + 1) // 2 if self.causal else self.N**2
        return PRODUCTS * 2 * self.B * self.H * self.d * pairs


@dataclass(frozen=True)
class Error:
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
    part: str, tensors: Sequence[Tensor], dout: Tensor, causal: bool, scale: float, simd: str = "auto"
) -> tuple[Backward, Backward]:
    """The backward passes of a part and of PyTorch's scaled_dot_product_attention."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(part, q, k, v, causal=causal, scale=scale, simd=simd)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    return backward_of(ours, tensors, dout), backward_of(sdpa, tensors, dout)


def errors(
    got: Sequence[Tensor],
    pytorch: Sequence[Tensor],
    tensors: Sequence[Tensor],
    dout: Tensor,
    causal: bool,
    scale: float,
) -> list[Error]:
    """The errors of two results against the reference in float64: dq, dk and dv.

    The allowed error is twice PyTorch's, plus a share of the largest gradient that grows with the root of d.
    """
    q, k, v = (t.double() for t in tensors)
    options = dict(causal=causal, scale=scale, br=256, bc=256)
    out, lse = reference.flash_attention(q, k, v, **options)  # type: ignore[arg-type]
    exact = reference.flash_attention_backward(q, k, v, out, lse, dout.double(), **options)  # type: ignore[arg-type]
    found = []
    for name, mine, peer, right in zip(("dq", "dk", "dv"), got, pytorch, exact):
        of_part, of_peer = (float((each - right).abs().max()) for each in (mine, peer))
        floor = max(FLOOR, ROUNDING * math.sqrt(q.shape[3]))
        allowed = 2 * of_peer + floor * float(right.abs().max())
        found.append(Error(name, of_part, of_peer, allowed))
    return found


def take_turns(functions: Sequence[Backward], rounds: int) -> list[float]:
    """The median seconds of a call of each function; the functions take turns."""
    repeats, times = [], [list[float]() for _ in functions]
    for function in functions:
        start = time.perf_counter()
        function()
        repeats.append(max(1, round(LEAST_SECONDS / (time.perf_counter() - start))))
    for _ in range(rounds):
        for function, count, seconds in zip(functions, repeats, times):
            start = time.perf_counter()
            for _ in range(count):
                function()
            seconds.append((time.perf_counter() - start) / count)
    return [statistics.median(each) for each in times]


def run(
    part: str,
    shape: Shape,
    simd: str = "auto",
    echo: Callable[[str], None] = print,
    rounds: int = 9,
) -> bool:
    """Test a part's gradients on normal numbers and time them; False if one is wrong.

    Raises ValueError if the part has no gradient, or part0's N x N matrices would not fit the memory.
    """
    if check_part(part).name not in with_gradient():
        raise ValueError(f"part is {part!r}; it must be one with a gradient: {', '.join(with_gradient())}")
    correctness.check_memory(shape.N, shape.B * shape.H)
    echo(f"Running {part} backward test: {PARTS[part].title}\n")
    if PARTS[part].operator:
        echo(extension.describe(simd) + "\n")
    *tensors, dout = normal(shape)
    scale = shape.d**-0.5
    both = contenders(part, tensors, dout, shape.causal, scale, simd)
    found = errors(both[0](), both[1](), tensors, dout, shape.causal, scale)
    for each in found:
        echo(
            f"{each.name}: largest error {each.part:.2e}, PyTorch's {each.pytorch:.2e}, "
            f"allowed {each.allowed:.2e}"
        )
    passed = all(each.passed for each in found)
    echo(f"manual gradients == float64 gradients {passed}\n")
    if not passed:
        return False
    ours, sdpa = take_turns(both, rounds)
    rate = shape.operations / ours
    share = rate / machine.fma_peak(simd, torch.get_num_threads())
    echo(f"{part} backward time:  {1e3 * ours:.3f}ms, {rate / 1e9:.1f} GFLOP/s, {share:.0%} of the FMA peak")
    echo(f"SDPA backward time:  {1e3 * sdpa:.3f}ms")
    echo(f"speed-up over SDPA:  {sdpa / ours:.2f}x")
    return True
