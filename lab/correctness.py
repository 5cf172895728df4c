"""The lab's test of one part: compares its result with PyTorch's and prints its time and memory.

On CUDA the time is that between events around a call, and the memory that of PyTorch's allocator. On WebGPU
the time is the call's, with the copies to the GPU and back, and the reference is on the CPU.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
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
from shakespeare.attention_ext.cuda.launches import Sizes
from shakespeare.attention_ext.parts import DEVICES, Dtype, check_compatible
from shakespeare.attention_ext.webgpu.gpu import opened
from shakespeare.attention_ext.webgpu.steps import choose as choose_step
from shakespeare.lab import machine
from shakespeare.lab.cuda import gpu
from shakespeare.lab.rules import example
from shakespeare.lab.text import counted

B, H, D = 1, 4, 32  # the lab's sizes
RULES = ("window", "softcap", "alibi", "sinks", "documents")
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
    i, j = torch.arange(N)[:, None], torch.arange(d)[None, :]
    planes = (a * i + b * j for a, b in ((0.0002, 0.0001), (0.0006, 0.0003), (0.00015, 0.0008)))
    q, k, v = (m.to(device, kind).expand(batch, heads, N, d).contiguous() for m in planes)
    return q, k, v


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
    (seconds,) = on.time(function, 1)
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
    return torch.cat([function(*tensors) for tensors in slices], dim=1).view(B, H, N, d)


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
    """The most heads whose N x N matrices fit in `free` bytes. Raises ValueError if below `least`."""
    bytes_of_head = MATRICES * 4 * N * N
    if free is not None and least * bytes_of_head > free:
        most = int((free / (MATRICES * 4 * least)) ** 0.5)
        need = f"the reference would need {least * bytes_of_head / 2**30:.0f} GiB"
        raise ValueError(f"N is {N}; {need}, so it must be at most {most} here with {counted(least, 'head')}")
    return least if free is None else int(free) // bytes_of_head


@dataclass(frozen=True)
class Test:
    """The lab's test of `part`: q, k and v of (batch, heads, N, d), at scale 1.

    br, bc: part4's tile; None takes tuned sizes, as a GPU must. simd: of SIMD, for parts 1 to 4. dtype: a
    Dtype or its value. device: of parts.DEVICES. kernel: one of part4's on a GPU. RULES: as example() takes
    them.
    """

    part: str
    N: int
    br: int | None = None
    bc: int | None = None
    causal: bool = False
    simd: str = "auto"
    dtype: str = Dtype.FP32
    batch: int = B
    heads: int = H
    d: int = D
    device: str = "cpu"
    kernel: str | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    documents: int | None = None
    score_mod: Path | None = None

    @cached_property
    def rules(self) -> dict[str, Any]:
        """The options of attention() for its rules. Raises ValueError if the part has none there."""
        where = "cuda" if self.device == "cuda" else "cpu"
        found = example(self.heads, self.N, where, **{name: getattr(self, name) for name in RULES})
        found |= {"score_mod": self.score_mod} if self.score_mod else {}
        if "documents" in found:
            found["documents"] = found["documents"].expand(self.batch, self.N)
        check_compatible(self.part, self.device, self.dtype, rules=tuple(found))
        return found

    def describe(self, on: gpu.Gpu | None) -> list[str]:
        """What computes the part. Raises ValueError if it does not take the inputs, BuildError likewise."""
        ours = PARTS[self.part].operator is not None
        if self.device == "cpu":
            return [extension.describe(self.simd)] if ours else []
        if on and not ours:
            return [on.describe()["name"]]
        if self.d > WIDEST:
            raise ValueError(f"d is {self.d}; it must be at most {WIDEST} on {DEVICES[self.device]}")
        tile: Any
        if on:
            operator("part4", "cuda")
            call = Sizes(self.batch * self.heads, self.N, self.N)
            kernel = driver.compiled(self.kernel, call, self.d, Dtype(self.dtype), on.device.index)
            where, what = on.describe()["name"], f"kernel {kernel.row.name}: {kernel.row.summary}"
            tile = kernel.tile
            threads = f"{tile.threads} threads and {tile.shared} bytes of shared memory for a block"
        else:
            adapter = opened().adapter
            step, tile = choose_step(self.kernel, self.d, Dtype(self.dtype), adapter)
            where, what = f"{adapter.name}, {adapter.backend}", f"step {step.name}: {step.summary}"
            threads = f"{tile.threads} threads of a workgroup"
        return [where, f"{what}; tiles of {tile.br} queries and {tile.bc} keys, {threads}"]

    def attention(self, part: str, tensors: Sequence[Tensor], slices: int) -> Tensor:
        """The output (B, H, N, d) of a part; part0's in slices of heads."""
        options: dict[str, Any] = dict(causal=self.causal, scale=1.0, **self.rules)
        ours = PARTS[part].operator is not None
        if self.device != "webgpu":
            options |= dict(br=self.br, bc=self.bc, simd=self.simd, kernel=self.kernel)
        elif ours:
            return webgpu.attention(*tensors, causal=self.causal, scale=1.0, kernel=self.kernel)
        else:  # PyTorch's on the CPU
            tensors = [t.float() for t in tensors]
        return in_slices(partial(attention, part, **options), 1 if ours else slices, tensors)


def run(part: str, N: int, echo: Callable[[str], None] = print, **settings: Any) -> bool:
    """Run the lab's test: reference, part, statistics. False on a mismatch. settings: the fields of Test.

    Raises ValueError for settings that the part refuses, BuildError without a GPU or a compiled kernel.
    """
    test = Test(part, N, **settings)
    allowed = check_compatible(part, test.device, test.dtype)
    heads, title, slices = test.batch * test.heads, PARTS[part].title, 1
    on = gpu.Gpu() if test.device == "cuda" else None
    timed: Callable[..., Run] = partial(measure_on_gpu, on) if on else measure
    ruled = [f"with {', '.join(test.rules)}"] * bool(test.rules)  # refused before anything is compiled
    shown = test.describe(on) + ruled
    if on:
        slices = -(-heads // heads_at_once(N, heads if test.rules else 1, FREE_SHARE * on.free()))
        if slices > 1:
            shown.append(f"The reference's N x N matrices do not fit at once: {slices} slices of heads")
    else:
        heads_at_once(N, heads, machine.available_memory())
    if test.device == "webgpu":
        step, _ = choose_step(test.kernel, test.d, allowed, opened().adapter)
        allowed = Dtype.FP16 if "shader-f16" in step.needs else allowed  # step 6 rounds K, V and the weights
    where = "cuda" if on else "cpu"
    tensors = synthetic_qkv(N, Dtype(test.dtype), test.batch, test.heads, test.d, where)
    echo("\n".join([f"Running {part} test: {title}\n", *shown]) + "\n" * bool(shown))

    echo("-----RUNNING REFERENCE IMPLEMENTATION-----\n")
    reference = timed(f"REFERENCE - {title}", lambda: test.attention("part0", tensors, slices))
    echo(f"PyTorch Execution Time:  {reference.seconds:.6f} s\n")
    echo(reference.table)

    echo(f"-----RUNNING {part.upper()}-----\n")
    ours = timed(f"{part.upper()} - {title}", lambda: test.attention(part, tensors, slices))
    difference = mismatch(reference.out, ours.out, allowed)
    echo(f"manual attention == pytorch attention {difference is None}")
    if difference:
        echo(difference)
        return False
    echo(f"Manual Execution Time:  {ours.seconds:.6f} s\n")
    echo(ours.table)

    for label, result, device in (("REFERENCE", reference, where), (part.upper(), ours, test.device)):
        echo(f"{label} - {title} statistics")
        echo(f"{device} time:  {1e3 * result.seconds:.3f}ms")
        echo(f"mem usage:  {result.memory} bytes\n")
    echo(f"speed-up over PyTorch:  {reference.seconds / ours.seconds:.2f}x")
    return True


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
