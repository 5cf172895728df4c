"""The lab's test of one part: compares its result, or its gradients, with PyTorch's; prints time and memory.

On CUDA the time is that between events around a call, and the memory that of PyTorch's allocator. On WebGPU
the time is the call's, with the copies to the GPU and back, and the reference is on the CPU. The gradients
are compared with float64, and timed beside SDPA's.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler import profile as profiler
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList
from torch.nn.functional import scaled_dot_product_attention

from shakespeare.attention_ext import PARTS, attention, extension, operator, reference, webgpu
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import GRADIENT, WIDEST
from shakespeare.attention_ext.cuda.launches import Sizes
from shakespeare.attention_ext.parts import DEVICES, Dtype, check_compatible, resolve_simd
from shakespeare.attention_ext.webgpu.driver import opened
from shakespeare.attention_ext.webgpu.steps import choose as choose_step
from shakespeare.lab import machine
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.cuda import device
from shakespeare.lab.formats import counted
from shakespeare.lab.timing import in_turns

# Relative and absolute tolerance. The lab allows 1e-4 on outputs of 0.08 to 0.2, and rounding is 1e-7. Two
# correct results may be rounded to neighbours, which are 1/128 apart in bfloat16 and 1/1024 in float16.
TOLERANCES = {Dtype.FP32: (1e-4, 1e-5), Dtype.BF16: (1 / 64, 1e-4), Dtype.FP16: (1 / 512, 1e-4)}
MATRICES = 2  # N x N float32 matrices that the reference holds for each head at once
FREE_SHARE = 0.9  # share of a GPU's free memory that they may take
FLOOR = 1e-6  # allowed error of any float32 gradient, as a share of the largest
ROUNDING = 2.0**-23  # the same for a sum of one term; for d terms it grows with the root of d
ROUNDS = 9  # rounds in which the gradients are timed
MIN_SECONDS = 0.02  # least time of a round


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
    N: int, dtype: Dtype = Dtype.FP32, batch: int = 1, heads: int = 4, d: int = 32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """The lab's inputs, each (batch, heads, N, d): planes over the position i and the feature j."""
    torch_dtype = dtype.torch_dtype
    i = torch.arange(N)[:, None]
    j = torch.arange(d)[None, :]
    planes = (a * i + b * j for a, b in ((0.0002, 0.0001), (0.0006, 0.0003), (0.00015, 0.0008)))
    q, k, v = (m.to(device, torch_dtype).expand(batch, heads, N, d).contiguous() for m in planes)
    return q, k, v


def allocated(function: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `function`, and the most bytes that PyTorch's allocator had allocated meanwhile."""
    run = measure("", function, warm_up=False)
    return run.out, run.memory


def measure(
    name: str, function: Callable[[], Tensor], on: device.Gpu | None = None, warm_up: bool = True
) -> Run:
    """Call `function` to warm up, and under PyTorch's profiler, as a row called `name`.

    on: a GPU, which also measures its memory and its time. The profiler is autograd's: torch.profiler imports
    PyTorch's compiler, which takes longer than the test. On a GPU its first buffers take milliseconds, which
    would count for the first call, so it is warmed up too.
    """
    kineto = partial(profiler, use_kineto=True, profile_memory=True, use_device="cuda" if on else None)
    if warm_up:
        function()
    if on:
        with kineto():
            function()
            torch.cuda.synchronize()
    with kineto() as recorded, record_function(name):
        start = time.perf_counter()
        out = function()
        seconds = time.perf_counter() - start
        if on:
            torch.cuda.synchronize()
    results: Any = recorded.kineto_results  # PyTorch's public averages give sums, not the peak
    events = [event for event in results.events() if event.name() == "[memory]"]
    allocated_bytes = accumulate(
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    )
    memory = max(allocated_bytes, default=0)
    if on:
        out, memory = on.allocated(function)
        (seconds,) = on.time(function, 1)
    return Run(out, seconds, memory, table(recorded.key_averages(), bool(on)) if warm_up else "")


def table(rows: EventList, on_gpu: bool) -> str:
    """The profiler's table by memory, or by time on a GPU; there without spans that repeat a row."""
    if not on_gpu:
        return rows.table(sort_by="cpu_memory_usage", row_limit=10)
    shown = (row for row in rows if not (row.is_user_annotation and row.device_type == DeviceType.CUDA))
    listed = EventList(shown, use_device="cuda", profile_memory=True)
    return listed.table(sort_by="cuda_time_total", row_limit=10)


def in_slices(function: Callable[..., Tensor], count: int, tensors: Sequence[Tensor]) -> Tensor:
    """function(q, k, v), (B, H, N, d), in `count` slices of heads."""
    if count == 1:
        return function(*tensors)
    B, H, N, d = tensors[0].shape
    slices = zip(*(t.view(1, B * H, -1, d).tensor_split(count, dim=1) for t in tensors))
    return torch.cat([function(*tensors) for tensors in slices], dim=1).view(B, H, N, d)


def mismatch(expected: Tensor, got: Tensor, dtype: Dtype = Dtype.FP32) -> str | None:
    """One line on the largest difference of two results (B, H, N, d) in a dtype; None if they agree."""
    expected = expected.float()
    got = got.float()
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


def heads_at_once(N: int, heads: int, free: float | None) -> int:
    """The most heads whose N x N matrices fit in `free` bytes. Raises ValueError if these heads do not."""
    head_bytes = MATRICES * 4 * N * N
    if free is not None and heads * head_bytes > free:
        limit = int((free / (MATRICES * 4 * heads)) ** 0.5)
        need = f"the reference would need {heads * head_bytes / 2**30:.0f} GiB"
        raise ValueError(
            f"N is {N}; {need}, so it must be at most {limit} here with {counted(heads, 'head')}"
        )
    return heads if free is None else int(free) // head_bytes


@dataclass(frozen=True)
class Test:
    """The lab's test of a cell, by a kernel of CUDA or a step of WebGPU; None for the fastest."""

    cell: Cell
    on: device.Gpu | None
    kernel: str | None
    rules: dict[str, Any]

    def describe(self) -> list[str]:
        """What computes the part. Raises ValueError if it does not take the inputs, BuildError likewise."""
        cell = self.cell
        ours = PARTS[cell.contender].operator is not None
        if cell.device == "cpu":
            passes = ""
            if cell.backward and resolve_simd(cell.simd or "auto") != "portable":
                passes = " in the forward pass; portable in the backward pass"
            return [extension.describe(cell.simd or "auto") + passes] if ours else []
        if self.on and not ours:
            return [self.on.describe()["name"]]
        if cell.d > WIDEST:
            raise ValueError(f"d is {cell.d}; it must be at most {WIDEST} on {DEVICES[cell.device]}")
        dtype = Dtype(cell.dtype)
        tile: Any
        if self.on:
            operator("part4", "cuda")
            call = Sizes(cell.batch * cell.heads, cell.N, cell.N)
            kernel = self.kernel or (GRADIENT if cell.backward else None)
            compiled = driver.compiled(kernel, call, cell.d, dtype, self.on.device.index)
            where = self.on.describe()["name"]
            what = f"kernel {compiled.row.name}: {compiled.row.summary}"
            tile = compiled.tile
            threads = f"{tile.threads} threads and {tile.shared} bytes of shared memory for a block"
        else:
            adapter = opened().adapter
            step, tile = choose_step(self.kernel, cell.d, dtype, adapter)
            where = f"{adapter.name}, {adapter.backend}"
            what = f"step {step.name}: {step.summary}"
            threads = f"{tile.threads} threads of a workgroup"
        return [where, f"{what}; tiles of {tile.br} queries and {tile.bc} keys, {threads}"]

    def attention(self, part: str, tensors: Sequence[Tensor], slices: int) -> Tensor:
        """The output (B, H, N, d) of a part at scale 1; part0's in slices of heads."""
        cell = self.cell
        ours = PARTS[part].operator is not None
        options: dict[str, Any] = {"causal": cell.causal, "scale": 1.0, **self.rules}
        if cell.device != "webgpu":
            options.update(br=cell.br, bc=cell.bc, simd=cell.simd or "auto", kernel=self.kernel)
        elif ours:
            return webgpu.attention(*tensors, causal=cell.causal, scale=1.0, kernel=self.kernel)
        else:  # PyTorch's on the CPU
            tensors = [t.float() for t in tensors]
        return in_slices(partial(attention, part, **options), 1 if ours else slices, tensors)


def run(
    cell: Cell, echo: Callable[[str], None] = print, kernel: str | None = None, score_mod: Path | None = None
) -> bool:
    """Run the lab's test of a part or of its gradients. False on a mismatch.

    cell: br and bc are part4's tile; None takes tuned sizes, as a GPU must. kernel: one of part4's on a GPU.
    score_mod: a user's header. Raises ValueError for what the part refuses, or if part0's N x N matrices
    would not fit the memory; BuildError without a GPU or a compiled kernel.
    """
    part = cell.contender
    where = "cuda" if cell.device == "cuda" else "cpu"
    rules = cell.options(where)
    if score_mod:
        rules["score_mod"] = score_mod
    allowed = check_compatible(part, cell.device, cell.dtype, gradient=cell.backward, rules=tuple(rules))
    on = device.Gpu() if where == "cuda" else None
    test = Test(cell, on, kernel, rules)
    title = PARTS[part].title
    shown = test.describe()  # refused before anything is compiled
    if rules:
        shown.append(f"with {', '.join(rules)}")
    heads = cell.batch * cell.heads
    slices = 1
    if on and not cell.backward:
        slices = -(-heads // heads_at_once(cell.N, heads if rules else 1, FREE_SHARE * on.free()))
        if slices > 1:
            shown.append(f"The reference's N x N matrices do not fit at once: {slices} slices of heads")
    else:
        heads_at_once(cell.N, heads, on.free() if on else machine.available_memory())
    what = "backward test" if cell.backward else "test"
    echo("\n".join([f"Running {part} {what}: {title}\n", *shown]) + ("\n" if shown else ""))
    if cell.backward:
        return gradients(test, echo)

    if cell.device == "webgpu":
        step, _ = choose_step(kernel, cell.d, allowed, opened().adapter)
        allowed = Dtype.FP16 if "shader-f16" in step.needs else allowed  # step 6 rounds K, V and the weights
    tensors = synthetic_qkv(cell.N, Dtype(cell.dtype), cell.batch, cell.heads, cell.d, where)
    echo("-----RUNNING REFERENCE IMPLEMENTATION-----\n")
    expected = measure(f"REFERENCE - {title}", lambda: test.attention("part0", tensors, slices), on)
    echo(f"PyTorch Execution Time:  {expected.seconds:.6f} s\n")
    echo(expected.table)

    echo(f"-----RUNNING {part.upper()}-----\n")
    ours = measure(f"{part.upper()} - {title}", lambda: test.attention(part, tensors, slices), on)
    difference = mismatch(expected.out, ours.out, allowed)
    echo(f"manual attention == pytorch attention {difference is None}")
    if difference:
        echo(difference)
        return False
    echo(f"Manual Execution Time:  {ours.seconds:.6f} s\n")
    echo(ours.table)

    for label, result, ran_on in (("REFERENCE", expected, where), (part.upper(), ours, cell.device)):
        echo(f"{label} - {title} statistics")
        echo(f"{ran_on} time:  {1e3 * result.seconds:.3f}ms")
        echo(f"mem usage:  {result.memory} bytes\n")
    echo(f"speed-up over PyTorch:  {expected.seconds / ours.seconds:.2f}x")
    return True


def normal(cell: Cell) -> list[Tensor]:
    """q, k, v and dout, each (B, H, N, d): normal numbers in the layout (B, N, H, d)."""
    generator = torch.Generator().manual_seed(0)
    size = (cell.batch, cell.N, cell.heads, cell.d)
    torch_dtype = Dtype(cell.dtype).torch_dtype
    numbers = (torch.randn(size, generator=generator) for _ in range(4))
    return [t.to(cell.device, torch_dtype).transpose(1, 2) for t in numbers]


def backward_of(forward: Callable[..., Tensor], tensors: Sequence[Tensor], dout: Tensor) -> Callable[[], Any]:
    """A function that computes the gradients of q, k and v from dout at each call."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def exact_gradients(tensors: Sequence[Tensor], causal: bool) -> tuple[Tensor, ...]:
    """The gradients of q, k and v in float64. tensors: these, and dout."""
    q, k, v, dout = (t.double() for t in tensors)
    options: dict[str, Any] = {"causal": causal, "scale": q.shape[3] ** -0.5, "br": 256, "bc": 256}
    out, lse = reference.flash_attention(q, k, v, **options)
    return reference.flash_attention_backward(q, k, v, out, lse, dout, **options)


def gradients(test: Test, echo: Callable[[str], None]) -> bool:
    """Compare gradients on normal numbers with float64, and time them; False if one is wrong.

    Allowed errors: twice PyTorch's, and a share that grows with sqrt(d).
    """
    cell = test.cell
    part = cell.contender
    *tensors, dout = normal(cell)
    ours = partial(attention, part, causal=cell.causal, simd=cell.simd or "auto", kernel=test.kernel)
    sdpa = partial(scaled_dot_product_attention, is_causal=cell.causal)
    both = [backward_of(forward, tensors, dout) for forward in (ours, sdpa)]
    exact = exact_gradients([*tensors, dout], cell.causal)
    floor = max(FLOOR, ROUNDING * math.sqrt(cell.d)) + Dtype(cell.dtype).rounding
    passed = True
    for name, right, *got in zip(("dq", "dk", "dv"), exact, *(backward() for backward in both)):
        error, pytorchs = (float((gradient - right).abs().max()) for gradient in got)
        allowed = 2 * pytorchs + floor * float(right.abs().max())
        echo(f"{name}: largest error {error:.2e}, PyTorch's {pytorchs:.2e}, allowed {allowed:.2e}")
        passed = passed and error <= allowed  # NaN is not
    echo(f"manual gradients == float64 gradients {passed}\n")
    if not passed:
        return False
    samples, sdpas = in_turns(both, ROUNDS, MIN_SECONDS, test.on)
    rate = cell.flops / samples.median
    speed = f"{rate / 1e12:.1f} TFLOP/s"
    if not test.on:
        share = rate / machine.fma_peak(threads=torch.get_num_threads())
        speed = f"{rate / 1e9:.1f} GFLOP/s, {share:.0%} of the FMA peak"
    echo(f"{part} backward time:  {1e3 * samples.median:.3f}ms, {speed}")
    if not test.on:
        echo(f"quiet samples:       {samples.quiet}; all take {samples.disturbance:.2f} times as long")
    echo(f"SDPA backward time:  {1e3 * sdpas.median:.3f}ms")
    echo(f"speed-up over SDPA:  {sdpas.median / samples.median:.2f}x")
    return True


def four_d_access(echo: Callable[[str], None]) -> bool:
    """Read a random element of a random 4-D tensor through the extension. False if it is wrong."""
    generator = torch.Generator()
    generator.seed()
    t = torch.rand(2, 4, 16, 32, generator=generator)
    index = tuple(int(torch.randint(n, (), generator=generator)) for n in t.shape)
    expected = t[index].item()
    result = extension.load().read_4d(t, *index)
    echo(f"Tensor Shape: {tuple(t.shape)}")
    echo(f"4D Tensor Index: {index}")
    echo(f"Expected: {expected:.6f}")
    echo(f"Result:   {result:.6f}")
    return expected == result
