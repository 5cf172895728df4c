"""The lab's test of one part: compares its result with PyTorch's and prints its time and memory.

On CUDA the time is that between events around a call, and the memory that of PyTorch's allocator. On WebGPU
the time is the call's, with the copies to the GPU and back, and the reference is on the CPU.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler import profile as cpu_profile
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shakespeare.attention_ext import PARTS, attention, extension, operator, webgpu
from shakespeare.attention_ext.cuda import gpu as driver
from shakespeare.attention_ext.cuda.kernels import WIDEST
from shakespeare.attention_ext.parts import Dtype, check_dtype
from shakespeare.attention_ext.webgpu.gpu import opened
from shakespeare.attention_ext.webgpu.steps import choose as choose_step
from shakespeare.lab import machine
from shakespeare.lab.cuda import gpu
from shakespeare.lab.text import counted

B, H, D = 1, 4, 32  # the lab's sizes
# Relative and absolute tolerance. The lab allows 1e-4 on outputs of 0.08 to 0.2, and rounding is 1e-7. Two
# correct results may be rounded to neighbours, which are 1/128 apart in bfloat16 and 1/1024 in float16.
TOLERANCES = {Dtype.FP32: (1e-4, 1e-5), Dtype.BF16: (1 / 64, 1e-4), Dtype.FP16: (1 / 512, 1e-4)}
MATRICES = 2  # N x N float32 matrices that the reference holds for each head at once
FREE_SHARE = 0.9  # share of a GPU's free memory that they may take


@dataclass(frozen=True)
class Run:
    """One implementation's output (B, H, N, d), its time and its memory.

    seconds: time of one call, wall time or the GPU's. memory: the most bytes that were allocated at once by
    PyTorch's allocator. table: the profiler's table, sorted by memory, on a GPU by CUDA time.
    """

    out: Tensor
    seconds: float
    memory: int
    table: str


def synthetic_qkv(
    N: int, dtype: Dtype = Dtype.FP32, batch: int = B, heads: int = H, d: int = D, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """The lab's inputs, each (batch, heads, N, d): planes over the position i and the feature j."""
    kind = getattr(torch, dtype.torch_name)
    i = torch.arange(N)[:, None]
    j = torch.arange(d)[None, :]
    q = 0.0002 * i + 0.0001 * j
    k = 0.0006 * i + 0.0003 * j
    v = 0.00015 * i + 0.0008 * j
    planes = (m.to(device, kind).expand(batch, heads, N, d).contiguous() for m in (q, k, v))
    return tuple(planes)  # type: ignore[return-value]


def allocated(function: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `function`, and the most bytes that PyTorch's allocator had allocated meanwhile."""
    run = measure("", function, warm_up=False)
    return run.out, run.memory


def measure(name: str, function: Callable[[], Tensor], warm_up: bool = True) -> Run:
    """Call `function` once to warm up and once under PyTorch's profiler, as a row called `name`.

    The profiler is autograd's: torch.profiler imports PyTorch's compiler, which takes longer than the test.
    """
    if warm_up:
        function()
    with cpu_profile(use_kineto=True, profile_memory=True) as profiler:
        with record_function(name):
            start = time.perf_counter()
            out = function()
            seconds = time.perf_counter() - start
    recorded: Any = profiler.kineto_results  # PyTorch's public averages give sums, not the peak
    events = [e for e in recorded.events() if e.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()))
    table = profiler.key_averages().table(sort_by="cpu_memory_usage", row_limit=10) if warm_up else ""
    return Run(out, seconds, max(held, default=0), table)


def measure_on_gpu(on: gpu.Gpu, name: str, function: Callable[[], Tensor]) -> Run:
    """Call `function` to warm up, for its memory, for its time, and under PyTorch's profiler.

    The profiler is warmed up too: its first buffers take milliseconds, which would count for the first call.
    """
    function()
    out, memory = on.allocated(function)
    _, launching = on.once(function)
    (seconds,) = on.time(function, 1, launching=launching)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    once = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=activities, profile_memory=True, acc_events=True, schedule=once) as profiler:
        for _ in range(2):
            with record_function(name):
                function()
            torch.cuda.synchronize()
            profiler.step()
    return Run(out, seconds, memory, table_by_cuda_time(profiler.key_averages()))


def table_by_cuda_time(rows: EventList) -> str:
    """The profiler's table without the profiler's steps and without spans that repeat a row on the GPU."""
    kept = (
        row
        for row in rows
        if not row.key.startswith("ProfilerStep")
        and not (row.is_user_annotation and row.device_type == DeviceType.CUDA)
    )
    wanted = EventList(kept, use_device="cuda", profile_memory=True)
    return wanted.table(sort_by="cuda_time_total", row_limit=10)


def in_slices(function: Callable[..., Tensor], count: int, tensors: Sequence[Tensor]) -> Tensor:
    """function(q, k, v), (B, H, N, d), in `count` slices of heads."""
    if count == 1:
        return function(*tensors)
    B, H, N, d = tensors[0].shape
    slices = zip(*(t.view(1, B * H, -1, d).tensor_split(count, dim=1) for t in tensors))
    return torch.cat([function(*each) for each in slices], dim=1).view(B, H, N, d)


def mismatch(expected: Tensor, got: Tensor, dtype: Dtype = Dtype.FP32) -> str | None:
    """One line on the largest difference of two results (B, H, N, d) in a dtype; None if they agree."""
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


def heads_at_once(N: int, least: int, free: float | None) -> int:
    """The most heads whose N x N matrices the reference can hold in `free` bytes; None is unknown.

    Raises ValueError if these are fewer than `least`.
    """
    each = MATRICES * 4 * N * N
    if free is not None and least * each > free:
        most = int((free / (MATRICES * 4 * least)) ** 0.5)
        raise ValueError(
            f"N is {N}; the reference would need {least * each / 2**30:.0f} GiB, "
            f"so it must be at most {most} here with {counted(least, 'head')}"
        )
    return least if free is None else int(free) // each


def run(
    part: str,
    N: int,
    br: int | None,
    bc: int | None,
    causal: bool,
    simd: str = "auto",
    dtype: str = Dtype.FP32,
    echo: Callable[[str], None] = print,
    *,
    batch: int = B,
    heads: int = H,
    d: int = D,
    device: str = "cpu",
    kernel: str | None = None,
) -> bool:
    """Run the lab's test of `part` at length N and scale 1: reference, part, statistics. False on a mismatch.

    br, bc: part4's tile, in queries and keys; None takes tuned sizes. simd: the helpers under parts 1 to 4,
    one of SIMD. dtype: that of the inputs, a Dtype or its value. device: one of parts.DEVICES. kernel: one of
    part4's on a GPU, where br and bc must be None. Raises ValueError if the part does not take them, and
    BuildError if there is no GPU or a kernel cannot be compiled.
    """
    kind = allowed = check_dtype(part, dtype, device)
    row, slices, shown = PARTS[part], 1, []
    timed: Callable[..., Run] = measure
    if device == "webgpu":
        if d > WIDEST:
            raise ValueError(f"d is {d}; it must be at most {WIDEST} on WebGPU")
        chosen, tile = choose_step(kernel, d, kind, opened().adapter)
        shown.append(f"{opened().adapter.name}, {opened().adapter.backend}")
        shown.append(
            f"step {chosen.name}: {chosen.summary}; tiles of {tile.br} queries and {tile.bc} keys, "
            f"{tile.threads} threads of a workgroup"
        )
        heads_at_once(N, batch * heads, machine.available_memory())
        allowed = Dtype.FP16 if "shader-f16" in chosen.needs else kind  # step 6 rounds K, V and the weights
    elif device == "cuda":
        on = gpu.Gpu()
        timed = partial(measure_on_gpu, on)
        shown.append(on.describe()["name"])
        if row.operator:
            shown.append(describe_kernel(on, kernel, batch * heads, N, d, kind))
        slices = -(-batch * heads // heads_at_once(N, 1, FREE_SHARE * on.free()))
        if slices > 1:
            shown.append(f"The reference's N x N matrices do not fit at once: {slices} slices of heads")
    else:
        heads_at_once(N, batch * heads, machine.available_memory())
        if row.operator:
            shown.append(extension.describe(simd))
    tensors = synthetic_qkv(N, kind, batch, heads, d, "cuda" if device == "cuda" else "cpu")
    echo("\n".join([f"Running {part} test: {row.title}\n", *shown]) + "\n" * bool(shown))

    def lab(part: str) -> Tensor:
        if device != "webgpu":
            attend = partial(
                attention, part, br=br, bc=bc, simd=simd, kernel=kernel, causal=causal, scale=1.0
            )
            return in_slices(attend, 1 if PARTS[part].operator else slices, tensors)
        if PARTS[part].operator:
            return webgpu.attention(*tensors, causal=causal, scale=1.0, kernel=kernel)
        return attention(part, *(t.float() for t in tensors), causal=causal, scale=1.0)

    echo("-----RUNNING REFERENCE IMPLEMENTATION-----\n")
    reference = timed(f"REFERENCE - {row.title}", lambda: lab("part0"))
    echo(f"PyTorch Execution Time:  {reference.seconds:.6f} s\n")
    echo(reference.table)

    echo(f"-----RUNNING {part.upper()}-----\n")
    ours = timed(f"{part.upper()} - {row.title}", lambda: lab(part))
    difference = mismatch(reference.out, ours.out, allowed)
    echo(f"manual attention == pytorch attention {difference is None}")
    if difference:
        echo(difference)
        return False
    echo(f"Manual Execution Time:  {ours.seconds:.6f} s\n")
    echo(ours.table)

    where = "cpu" if device == "webgpu" else device
    for label, result, where in (("REFERENCE", reference, where), (part.upper(), ours, device)):
        echo(f"{label} - {row.title} statistics")
        echo(f"{where} time:  {1e3 * result.seconds:.3f}ms")
        echo(f"mem usage:  {result.memory} bytes\n")
    echo(f"speed-up over PyTorch:  {reference.seconds / ours.seconds:.2f}x")
    return True


def describe_kernel(on: gpu.Gpu, kernel: str | None, heads: int, N: int, d: int, dtype: Dtype) -> str:
    """Compile the kernel that runs, and describe it in one line.

    Raises ValueError if it does not take the inputs or this GPU, BuildError if it cannot be compiled.
    """
    if d > WIDEST:
        raise ValueError(f"d is {d}; it must be at most {WIDEST} on CUDA")
    operator("part4", "cuda")
    chosen = driver.compiled(kernel, heads, N, N, d, dtype, on.device.index)
    row, tile = chosen.row, chosen.tile
    return (
        f"kernel {row.name}: {row.summary}; tiles of {tile.br} queries and {tile.bc} keys, "
        f"{tile.threads} threads and {tile.shared} bytes of shared memory for a block"
    )


def four_d_access(seed: int | None = None, echo: Callable[[str], None] = print) -> bool:
    """Read a random element of a random 4-D tensor through the extension. False if it is wrong."""
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    t = torch.rand(2, 4, 16, 32, generator=generator)
    index = tuple(int(torch.randint(n, (), generator=generator)) for n in t.shape)
    expected, result = t[index].item(), extension.load().read_4d(t, *index)
    echo(f"Tensor Shape: {tuple(t.shape)}")
    echo(f"4D Tensor Index: {index}")
    echo(f"Expected: {expected:.6f}")
    echo(f"Result:   {result:.6f}")
    return expected == result
