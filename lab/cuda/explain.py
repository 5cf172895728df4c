"""gpt.py explain part4 --device cuda: a kernel's resources, its own counts, its bound and its time."""

from __future__ import annotations

import functools
import json
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from attention_ext.build.nvrtc import Resources
from attention_ext.cuda.kernels import WIDEST, Gpu, Kernel, choose, few_queries
from attention_ext.cuda.tiles import Tile
from attention_ext.parts import BuildError, Dtype, check_dtype
from lab.cuda import architectures, costs, nsight
from lab.cuda.architectures import EXPONENTIALS, SHARED_BYTES, SHEETS, Device, Occupancy, occupancy
from lab.cuda.costs import WAVEFRONT, Count, Launch, Shared
from lab.text import size_text
from lab.traffic import Case, Stream

LONGEST = 2**24  # N; counting goes over the tiles
WARM_UPS, REPEATS = 3, 20


@dataclass(frozen=True)
class Question:
    """The arguments of explain: q is (batch, heads, queries, d), k and v are (batch, heads, N, d).

    queries: by default N. kernel: its name, or None for the fastest. arch: a key of SHEETS, or None for this
    machine's GPU, which is also measured.
    """

    N: int
    d: int
    batch: int
    heads: int
    causal: bool
    dtype: str
    queries: int | None = None
    kernel: str | None = None
    arch: str | None = None

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The rows of q, of k and of v."""
        return self.queries or self.N, self.N, self.N


@dataclass(frozen=True)
class Answer:
    """A kernel for a question, compiled. blocks: resident on a multiprocessor; driver: by the driver."""

    case: Case
    kernel: Kernel
    tile: Tile
    on: Device
    resources: Resources
    fits: Occupancy
    blocks: int
    driver: bool
    count: Count


def explain(asked: Question, echo: Callable[[str], None]) -> None:
    """Print the costs of a kernel on a GPU, its bound and, on this machine's GPU, its time.

    Raises ValueError if the kernel or the GPU does not take the arguments, BuildError without a GPU and an
    architecture, or without a compiler.
    """
    answer = compiled(asked)
    echo(heading(asked, answer) + "\n")
    echo(textwrap.fill(answer.kernel.why, 100) + "\n")
    echo(
        f"arithmetic  {_scaled(answer.case.flops)}FLOP: 2 d for each query and key, for scores and for output"
    )
    echo(resources_text(answer) + "\n\n" + moved_table(answer) + "\n\n" + bound_text(answer))
    if asked.arch is not None:
        echo("measured    not: this is counted for an architecture, without a GPU")
        return
    seconds, error = measured(asked, answer)
    peak = limits(answer)[0]
    rate = answer.case.flops / seconds
    share = f"{100 * peak[2] / seconds:.0f} % of {peak[0]}"
    echo(f"measured    {1e3 * seconds:.3g} ms (IQR {1e3 * error:.2g}), {rate / 1e12:.3g} TFLOP/s = {share}")
    case, name = answer.case, answer.kernel.name
    shape = [asked.batch, asked.heads, case.Nq, case.Nk, case.d]
    arguments = json.dumps([shape, case.dtype.torch_name, asked.causal, name])
    try:
        echo(nsight_text(nsight.count(arguments), answer))
    except nsight.NotCounted as reason:
        echo(f"Nsight      not counted: {reason}")


def compiled(asked: Question) -> Answer:
    """The requested kernel, compiled for the GPU. Raises the errors of explain()."""
    from attention_ext.cuda import driver

    dtype = check_dtype("part4", asked.dtype, "cuda")
    for name, size, most in (("d", asked.d, WIDEST), ("N", asked.N, LONGEST)):
        if size > most:
            raise ValueError(f"{name} is {size}; it must be at most {most} on CUDA")
    Nq, Nk, _ = asked.lengths
    if Nq > (Nk if asked.causal else LONGEST):
        allowed = f"N={Nk} with a causal mask" if asked.causal else str(LONGEST)
        raise ValueError(f"queries is {Nq}; it must be at most {allowed}")
    if asked.arch is None:
        import torch

        try:
            driver.check_gpu()
        except BuildError as error:
            raise BuildError(f"{error}; --arch {'|'.join(SHEETS)} explains a kernel without a GPU") from None
        index = torch.cuda.current_device()
        on, gpu = architectures.here(index), driver.gpu(index)
    else:
        index, on = 0, SHEETS[asked.arch]
        gpu = Gpu(on.name, on.capability, on.architecture.block_shared, on.multiprocessors)
    heads = asked.batch * asked.heads
    few = few_queries(Nq, Nk, heads, gpu.multiprocessors)
    kernel, tile = choose(asked.kernel, asked.d, dtype, gpu, few, Nq)
    _, resources = driver.source(kernel, tile, asked.d, dtype, on.capability).compile()
    fits = occupancy(on.architecture, tile.threads, resources.registers, tile.shared + resources.shared)
    blocks = fits.blocks
    if asked.arch is None:
        torch.cuda.synchronize(index)  # makes the GPU's context current
        blocks = driver.load(kernel, tile, asked.d, dtype, index).resident()
    case = Case(Nq, Nk, asked.d, heads, asked.causal, tile.br, tile.bc, 1, dtype)
    count = costs.counted(Launch(case, kernel, tile, blocks * on.multiprocessors))
    return Answer(case, kernel, tile, on, resources, fits, blocks, asked.arch is None, count)


def heading(asked: Question, answer: Answer) -> str:
    """The kernel, the case and the GPU."""
    heads, on = asked.batch * asked.heads, answer.on
    mask = "causal" if asked.causal else "no mask"
    rows = f"{asked.queries} quer{'y' if asked.queries == 1 else 'ies'} and " if asked.queries else ""
    what = f"{heads} head{'s' * (heads > 1)} of {rows}N = {asked.N}, d = {asked.d}, {asked.dtype}, {mask}"
    source = "" if answer.driver else ", by its data sheet"
    return (
        f"part4, kernel {answer.kernel.name}, {answer.kernel.summary}: {what}\n"
        f"{on.name}, {on.multiprocessors} multiprocessors at up to {on.hertz / 1e9:.2f} GHz, "
        f"{on.bandwidth / 1e12:.2f} TB/s, L2 {size_text(on.l2)}{source}"
    )


def resources_text(answer: Answer) -> str:
    """The resources of a launch: blocks, registers, spills, shared memory, occupancy."""
    tile, used, fits, count = answer.tile, answer.resources, answer.fits, answer.count
    launches = f" in {count.launches:,} launches" if count.launches > 1 else ""
    spilled = f"{used.spill_stores} B stored, {used.spill_loads} B loaded" if used.spill_stores else "none"
    resident = f"{answer.blocks} block{'s' * (answer.blocks != 1)} a multiprocessor"
    share = f"{answer.blocks * fits.warps} of {fits.most} warps = {100 * fits.share(answer.blocks):.0f} %"
    others = ", ".join(f"{number} by {name}" for name, number in fits.limits.items())
    said = "by the driver" if answer.driver else "counted from ptxas's report"
    bound = f", limited by {' and '.join(fits.bound)}" if answer.blocks == fits.blocks else ""
    return "\n".join(
        (
            f"launch      {count.blocks:,} blocks{launches} of {tile.threads} threads; "
            f"tiles of {tile.br} queries and {tile.bc} keys",
            f"registers   {used.registers} a thread; spilled: {spilled}; stack {used.stack} B",
            f"shared      {size_text(tile.shared + used.shared)} a block",
            f"occupancy   {resident} ({said}), {share}{bound}",
            f"            blocks that fit: {others}",
        )
    )


def moved_table(answer: Answer) -> str:
    """Bytes of each matrix through shared memory, over the fewest possible, and through global memory."""
    count, l2 = answer.count, answer.on.l2
    titles = ("shared memory", "over the fewest", "global memory", f"past L2 ({size_text(l2)})")
    lines = ["moved       " + "".join(f"{title:>20}" for title in titles)]
    shared = {each.name: each for each in count.shared}
    streams = {each.name: each for each in count.streams}

    def line(name: str, wavefronts: float, fewest: float, asked: float, memory: float) -> str:
        near, asked_text, far = (size_text(n) if n else "-" for n in (WAVEFRONT * wavefronts, asked, memory))
        ratio = f"{wavefronts / fewest:.3g} x" if fewest else "-"
        return f"  {name:10}" + "".join(f"{cell:>20}" for cell in (near, ratio, asked_text, far))

    for name in sorted({*streams, *shared}, key=ORDER.index):
        near, far = shared.get(name, Shared(name, 0, 0)), streams.get(name, Stream(name, 0))
        lines.append(line(name, near.wavefronts, near.fewest, far.traffic(1), far.traffic(l2)))
    fewest = sum(each.fewest for each in count.shared)
    lines.append(line("all", count.wavefronts, fewest, count.asked, count.from_memory(l2)))
    return "\n".join(lines)


def limits(answer: Answer) -> list[tuple[str, str, float]]:
    """(name, its rate as text, least seconds) of each limit; the arithmetic's peak is the first."""
    on, count = answer.on, answer.count
    tensor = count.tensor
    rate = on.rate(on.architecture.tensor / tensor if tensor else 2 * on.architecture.fma)
    unit = "tensor" if tensor else "FMA"
    products = ", in three products of tf32" if tensor > 1 else ""
    found = [(f"the {unit} peak", f"{rate / 1e12:.4g} TFLOP/s{products}", answer.case.flops / rate)]
    if count.wavefronts:
        shared = on.rate(SHARED_BYTES)
        found.append(("shared memory", f"{shared / 1e12:.3g} TB/s", WAVEFRONT * count.wavefronts / shared))
    exponentials = on.rate(EXPONENTIALS)
    many = f"{_scaled(count.exponentials).strip()} of them, {exponentials / 1e12:.3g} T a second"
    found.append(("exponentials", many, count.exponentials / exponentials))
    if on.bandwidth:  # some drivers give no clock of the memory
        found.append(("memory", f"{on.bandwidth / 1e12:.3g} TB/s", count.from_memory(on.l2) / on.bandwidth))
    return found


def bound_text(answer: Answer) -> str:
    """The least time that each limit allows, and the longest."""
    found = limits(answer)
    lines = [
        f"{'at least' if i == 0 else '':12}{1e3 * seconds:.3g} ms for {name} ({rate})"
        for i, (name, rate, seconds) in enumerate(found)
    ]
    return "\n".join([*lines, f"bound by    {max(found, key=lambda limit: limit[2])[0]}"])


def measured(asked: Question, answer: Answer) -> tuple[float, float]:
    """The median seconds of a call, timed as bench times it, and their interquartile range.

    Raises ValueError if the tensors do not fit the GPU's memory.
    """
    import torch

    from attention_ext import attention
    from lab.cuda.gpu import Gpu

    gpu = Gpu()
    dtype = getattr(torch, Dtype(asked.dtype).torch_name)
    row = asked.batch * asked.heads * asked.d
    numbers = row * (2 * asked.lengths[0] + 2 * asked.N)
    need = numbers * (dtype.itemsize + 4)  # kernel 1 has a state in float32, others have padded copies
    free = gpu.free()
    if need > free:
        raise ValueError(
            f"N is {asked.N}; q, k, v and the output need {size_text(need)} and {size_text(free)} are free "
            "on the GPU, so it must be smaller"
        )
    shape = (asked.batch, asked.heads)
    q, k, v = (torch.randn(*shape, rows, asked.d, device=gpu.device, dtype=dtype) for rows in asked.lengths)
    call = functools.partial(attention, "part4", q, k, v, causal=asked.causal, kernel=answer.kernel.name)
    gpu.time(call, WARM_UPS)
    _, launching = gpu.once(call)
    seconds = gpu.time(call, REPEATS, launching=launching)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return median, high - low


def nsight_text(counted: nsight.Counted, answer: Answer) -> str:
    """The homework's table, and the counts beside the kernel's own."""

    def rate(name: str) -> str:
        if name not in counted.values or not counted.seconds:
            return "not counted"
        return f"{counted.values[name] / counted.seconds / 1e9:,.0f} GB/s"

    def share(name: str) -> str:
        return f"{counted.values[name]:.1f} %" if name in counted.values else "not counted"

    rows = [
        ("achieved occupancy", share("achieved occupancy")),
        ("SM efficiency", share("SM efficiency")),
        *((f"{name} throughput", rate(name)) for name in nsight.METRICS if name.split()[0] in PLACES),
    ]
    count = answer.count
    some = f", of {counted.launches} of its launches" if counted.launches < count.launches else ""
    lines = [f"Nsight      of one call, {1e3 * counted.seconds:.3g} ms{some}"]
    lines += [f"  {name:26}{value:>16}" for name, value in rows]
    part = counted.launches / count.launches
    for place, names, own in (
        ("shared", ("shared load", "shared store"), WAVEFRONT * count.wavefronts),
        ("memory", ("memory read", "memory write"), count.from_memory(answer.on.l2)),
    ):
        if all(name in counted.values for name in names):
            total = size_text(sum(counted.values[name] for name in names))
            lines.append(f"  {place} bytes: {total}; by the kernel's count {size_text(part * own)}")
    return "\n".join(lines)


ORDER = ("Q", "K", "S", "P", "V", "m, l, O", "O")  # order of a table's rows
PLACES = ("shared", "global", "local", "L2", "memory")  # memories whose throughput is shown


def _scaled(number: float) -> str:
    """537e6 as '0.537 G', with the unit's letter."""
    if number >= 1e11:
        return f"{number / 1e12:.3g} T"
    return f"{number / 1e9:.3g} G" if number >= 1e8 else f"{number / 1e6:.3g} M"
