"""The lab's test of one part: compares its result with PyTorch's, and prints its time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from attention_ext import PARTS, attention, extension
from attention_ext.parts import Dtype, check_dtype
from lab import machine

B, H, D = 1, 4, 32  # the lab's sizes
# Relative and absolute, of a difference. The lab allows 1e-4 on outputs of 0.08 to 0.2, and rounding is 1e-7.
# Two right results in bfloat16 may be rounded to neighbours, 1/128 apart.
TOLERANCES = {Dtype.FP32: (1e-4, 1e-5), Dtype.BF16: (1 / 64, 1e-4)}


@dataclass(frozen=True)
class Run:
    """One implementation's output (B, H, N, d), its time and its memory.

    seconds: wall time of one call. memory: the most bytes that PyTorch's allocator had given out at
    once. table: the profiler's, by memory.
    """

    out: Tensor
    seconds: float
    memory: int
    table: str


def synthetic_qkv(N: int, dtype: Dtype = Dtype.FP32) -> tuple[Tensor, Tensor, Tensor]:
    """The lab's inputs, each (1, 4, N, 32): planes over i, the position, and j, the feature."""
    kind = getattr(torch, dtype.torch_name)
    i = torch.arange(N)[:, None]
    j = torch.arange(D)[None, :]
    q = 0.0002 * i + 0.0001 * j
    k = 0.0006 * i + 0.0003 * j
    v = 0.00015 * i + 0.0008 * j
    return tuple(m.expand(B, H, N, D).to(kind).contiguous() for m in (q, k, v))  # type: ignore[return-value]


def measure(name: str, function: Callable[[], Tensor]) -> Run:
    """Call `function` once to warm up and once under PyTorch's profiler, as a row called `name`."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        with record_function(name):
            start = time.perf_counter()
            out = function()
            seconds = time.perf_counter() - start
    table = profiler.key_averages().table(sort_by="cpu_memory_usage", row_limit=10)
    return Run(out, seconds, _peak_memory(profiler), table)


def _peak_memory(profiler: profile) -> int:
    """The highest sum of the allocations and releases that the profiler recorded, in bytes."""
    recorded: Any = profiler.profiler  # PyTorch's public averages give sums, not the peak
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    peak = held = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def allocated(function: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `function`, and the peak of the bytes that PyTorch's allocator gave out meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        out = function()
    return out, _peak_memory(profiler)


def mismatch(expected: Tensor, got: Tensor, dtype: Dtype = Dtype.FP32) -> str | None:
    """Where two results (B, H, N, d) in a dtype differ most, in one line; None if they agree."""
    expected, got = expected.float(), got.float()
    rtol, atol = TOLERANCES[dtype]
    off = ~torch.isclose(got, expected, rtol, atol)
    if not off.any():
        return None
    error = (got - expected).abs().nan_to_num(nan=torch.inf).where(off, -torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return (
        f"largest difference at index {index}: expected {expected[index]:.6g}, got {got[index]:.6g}; "
        f"{int(off.sum())} of {off.numel()} elements are off"
    )


def check_memory(N: int) -> None:
    """Raise ValueError if the reference's N x N matrices would not fit this machine's memory."""
    need = 2 * 4 * B * H * N * N
    available = machine.available_memory()
    if available is not None and need > available:
        most = int((available / (2 * 4 * B * H)) ** 0.5)
        raise ValueError(
            f"N is {N}; the reference would need {need / 2**30:.0f} GiB, so it must be at most {most} here"
        )


def run(
    part: str,
    N: int,
    br: int | None,
    bc: int | None,
    causal: bool,
    simd: str = "auto",
    dtype: str = Dtype.FP32,
    echo: Callable[[str], None] = print,
) -> bool:
    """Run the lab's test of `part` at length N, scale 1: reference, part, statistics; False on a mismatch.

    br, bc: part4's tile, in queries and keys; None takes tuned sizes. simd: the helpers under parts 1 to 4,
    one of SIMD. dtype: the inputs', a Dtype or its value. Raises ValueError if the part does not take it.
    """
    kind = check_dtype(part, dtype)
    title = PARTS[part].title
    check_memory(N)
    q, k, v = synthetic_qkv(N, kind)
    echo(f"Running {part} test: {title}\n")
    if PARTS[part].operator:
        echo(extension.describe(simd) + "\n")

    echo("-----RUNNING REFERENCE IMPLEMENTATION-----\n")
    lab = partial(attention, q=q, k=k, v=v, causal=causal, scale=1.0, br=br, bc=bc, simd=simd)
    reference = measure(f"REFERENCE - {title}", lambda: lab("part0"))
    echo(f"PyTorch Execution Time:  {reference.seconds:.6f} s\n")
    echo(reference.table)

    echo(f"-----RUNNING {part.upper()}-----\n")
    ours = measure(f"{part.upper()} - {title}", lambda: lab(part))
    difference = mismatch(reference.out, ours.out, kind)
    echo(f"manual attention == pytorch attention {difference is None}")
    if difference:
        echo(difference)
        return False
    echo(f"Manual Execution Time:  {ours.seconds:.6f} s\n")
    echo(ours.table)

    for label, result in (("REFERENCE", reference), (part.upper(), ours)):
        echo(f"{label} - {title} statistics")
        echo(f"cpu time:  {1e3 * result.seconds:.3f}ms")
        echo(f"mem usage:  {result.memory} bytes\n")
    echo(f"speed-up over PyTorch:  {reference.seconds / ours.seconds:.2f}x")
    return True


def four_d_access(seed: int | None = None, echo: Callable[[str], None] = print) -> bool:
    """Read a random element of a random 4-D tensor through the extension; False if it is the wrong one."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    t = torch.rand(2, 4, 16, 32, generator=generator)
    index = tuple(int(torch.randint(n, (), generator=generator)) for n in t.shape)
    expected, result = t[index].item(), extension.read_4d(t, index)  # type: ignore[arg-type]
    echo(f"Tensor Shape: {tuple(t.shape)}")
    echo(f"4D Tensor Index: {index}")
    echo(f"Expected: {expected:.6f}")
    echo(f"Result:   {result:.6f}")
    return expected == result
