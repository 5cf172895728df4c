"""gpt.py explain part4 --device cuda: a kernel's resources, its own counts, its bound and its time."""

import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shakespeare.attention_ext.build.nvrtc import Resources
from shakespeare.attention_ext.cuda import gpu as driver
from shakespeare.attention_ext.cuda.kernels import BACKWARD, WIDEST, Gpu, Kernel, choose, queries_of
from shakespeare.attention_ext.cuda.launches import Sizes
from shakespeare.attention_ext.cuda.tiles import Tile
from shakespeare.attention_ext.parts import BuildError, check_compatible
from shakespeare.lab.bench.cases import Cell, check_memory
from shakespeare.lab.bench.contenders import OF_KERNEL, prepared
from shakespeare.lab.bench.measure import inputs
from shakespeare.lab.cuda import architectures, costs, gpu
from shakespeare.lab.cuda.architectures import SHEETS, WARP, architecture, occupancy, rate
from shakespeare.lab.cuda.costs import WAVEFRONT, Count, Launch, Shared
from shakespeare.lab.explain import Limit, arithmetic_text, bound_text
from shakespeare.lab.text import counted, scaled, size_text
from shakespeare.lab.timing import quartiles
from shakespeare.lab.traffic import Case, Stream

LONGEST = 2**24  # N; counting goes over the tiles
REPEATS = 20
ORDER = ("Q", "dO", "K", "S", "P", "V", "m, l, O", "O", "dQ, dK, dV")  # order of a table's rows


@dataclass(frozen=True)
class Answer:
    """A kernel for a cell, compiled.

    fits: blocks that each resource of a multiprocessor allows. blocks: those resident; driver: by the driver.
    """

    case: Case
    kernel: Kernel
    tile: Tile
    on: Gpu
    resources: Resources
    fits: dict[str, int]
    blocks: int
    driver: bool
    count: Count


def explain(
    cell: Cell, echo: Callable[[str], None], kernel: str | None = None, arch: str | None = None
) -> None:
    """Print the costs of a kernel on a GPU, its bound and, on this machine's GPU, its time.

    kernel: None for the fastest. arch: a key of SHEETS, None for this machine's GPU. Raises ValueError for
    refused arguments, BuildError without a compiler, or without a GPU and an architecture.
    """
    answer = compiled(cell, kernel, arch)
    limits = limits_of(answer)
    echo(heading(cell, answer) + "\n")
    echo(textwrap.fill(answer.kernel.why, 100) + "\n")
    echo(arithmetic_text(answer.case, answer.count.flops))
    echo(resources_text(answer) + "\n\n" + moved_table(answer) + "\n\n" + bound_text(limits))
    if arch is not None:
        echo("measured    not: this is counted for an architecture, without a GPU")
        return
    seconds, error = measured(cell, answer.kernel.name)
    peak, _, least = limits[0]
    share = f"{answer.count.flops / seconds / 1e12:.3g} TFLOP/s = {100 * least / seconds:.0f} % of {peak}"
    echo(f"measured    {1e3 * seconds:.3g} ms (IQR {1e3 * error:.2g}), {share}")


def compiled(cell: Cell, name: str | None = None, arch: str | None = None) -> Answer:
    """The requested kernel, compiled for the GPU. For the arguments and the errors see explain()."""
    dtype, d, Nq, Nk = check_compatible("part4", "cuda", cell.dtype), cell.d, cell.queries, cell.N
    for what, size, most in (("d", d, WIDEST), ("N", Nk, LONGEST)):
        if size > most:
            raise ValueError(f"{what} is {size}; it must be at most {most} on CUDA")
    if Nq > (Nk if cell.causal else LONGEST):
        allowed = f"N={Nk} with a causal mask" if cell.causal else str(LONGEST)
        raise ValueError(f"queries is {Nq}; it must be at most {allowed}")
    if arch is None:
        try:
            driver.check_gpu()
        except BuildError as error:
            raise BuildError(f"{error}; --arch {'|'.join(SHEETS)} explains a kernel without a GPU") from None
        index = torch.cuda.current_device()
        on = driver.gpu(index)
    else:
        on = SHEETS[arch]
    queries = queries_of(Sizes(cell.batch * cell.heads, Nq, Nk), dtype, on)
    kernel, tile = choose(name, d, dtype, on, queries)
    _, resources = driver.source(kernel, tile, d, dtype, on.capability).compile()
    fits = occupancy(architecture(on), tile.threads, resources.registers, tile.shared + resources.shared)
    blocks = min(fits.values())
    if arch is None:
        torch.cuda.synchronize(index)  # makes the GPU's context current
        blocks = driver.resident(driver.load(kernel, tile, d, dtype, index))
    case = replace(cell.case(), br=tile.br, bc=tile.bc)
    launch = Launch(case, kernel, tile, blocks * on.multiprocessors)
    return Answer(case, kernel, tile, on, resources, fits, blocks, arch is None, costs.counted(launch))


def heading(cell: Cell, answer: Answer) -> str:
    """The kernel, the case and the GPU."""
    heads, on = counted(cell.batch * cell.heads, "head"), answer.on
    mask = "causal" if cell.causal else "no mask"
    rows = f"{cell.queries} quer{'y' if cell.queries == 1 else 'ies'} and " * (cell.queries != cell.N)
    what = f"{heads} of {rows}N = {cell.N}, d = {cell.d}, {cell.dtype}, {mask}"
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
    resident = f"{counted(answer.blocks, 'block')} a multiprocessor"
    warps, most = answer.blocks * -(-tile.threads // WARP), architecture(answer.on).warps
    share = f"{warps} of {most} warps = {100 * warps / most:.0f} %"
    others = ", ".join(f"{number} by {name}" for name, number in fits.items())
    said = "by the driver" if answer.driver else "counted from ptxas's report"
    bounds = [name for name, number in fits.items() if number == min(fits.values())]
    bound = f", limited by {' and '.join(bounds)}" if answer.blocks == min(fits.values()) else ""
    return (
        f"launch      {count.blocks:,} blocks{launches} of {tile.threads} threads; "
        f"tiles of {tile.br} queries and {tile.bc} keys\n"
        f"registers   {used.registers} a thread; spilled: {spilled}; stack {used.stack} B\n"
        f"shared      {size_text(tile.shared + used.shared)} a block\n"
        f"occupancy   {resident} ({said}), {share}{bound}\n"
        f"            blocks that fit: {others}"
    )


def moved_table(answer: Answer) -> str:
    """Bytes of each matrix through shared memory, over the fewest possible, and through global memory."""
    count, l2 = answer.count, answer.on.l2
    titles = ("shared memory", "over the fewest", "global memory", f"past L2 ({size_text(l2)})")
    lines = ["moved       " + "".join(f"{title:>20}" for title in titles)]
    shared = {access.name: access for access in count.shared}
    streams = {stream.name: stream for stream in count.streams}

    def line(name: str, wavefronts: float, fewest: float, asked: float, memory: float) -> str:
        near, asked_text, far = (size_text(n) if n else "-" for n in (WAVEFRONT * wavefronts, asked, memory))
        ratio = f"{wavefronts / fewest:.3g} x" if fewest else "-"
        return f"  {name:10}" + "".join(f"{cell:>20}" for cell in (near, ratio, asked_text, far))

    for name in sorted({*streams, *shared}, key=ORDER.index):
        near, far = shared.get(name, Shared(name, 0, 0)), streams.get(name, Stream(name, 0))
        lines.append(line(name, near.wavefronts, near.fewest, far.traffic(1), far.traffic(l2)))
    fewest = sum(access.fewest for access in count.shared)
    lines.append(line("all", count.wavefronts, fewest, count.asked, count.from_memory(l2)))
    if not shared:
        metric = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
        lines.append(f"  A profiler counts what passes through shared memory: ncu --metrics {metric} COMMAND")
    return "\n".join(lines)


def limits_of(answer: Answer) -> list[Limit]:
    """The limits; the arithmetic's peak is the first."""
    on, count = answer.on, answer.count
    tensor, clock = count.tensor, architecture(on)
    peak = rate(on, clock.tensor / tensor if tensor else 2 * clock.fma) / count.products
    unit = "tensor" if tensor else "FMA"
    products = ", in three products of tf32" * (tensor > 1)
    products += ", seven products for five" * (count.products > 1)
    limits = [(f"the {unit} peak", f"{peak / 1e12:.4g} TFLOP/s{products}", count.flops / peak)]
    if count.wavefronts:
        shared = rate(on, architectures.SHARED_BYTES)
        limits.append(("shared memory", f"{shared / 1e12:.3g} TB/s", WAVEFRONT * count.wavefronts / shared))
    exponentials = rate(on, architectures.EXPONENTIALS)
    many = f"{scaled(count.exponentials).strip()} of them, {exponentials / 1e12:.3g} T a second"
    limits.append(("exponentials", many, count.exponentials / exponentials))
    if on.bandwidth:  # some drivers give no clock of the memory
        limits.append(("memory", f"{on.bandwidth / 1e12:.3g} TB/s", count.from_memory(on.l2) / on.bandwidth))
    return limits


def measured(cell: Cell, kernel: str) -> tuple[float, float]:
    """The median seconds of a call, timed as bench times it, and their interquartile range.

    Raises ValueError if the tensors do not fit the GPU's memory.
    """
    on = gpu.Gpu()
    check_memory([cell], on.free())
    name = next(name for name, row in OF_KERNEL.items() if row.name == kernel)
    cell = replace(cell, contender=name, backward=kernel in BACKWARD)
    call = prepared(cell, *inputs(cell, on.device))
    seconds = on.time(call, REPEATS)
    low, high = quartiles(seconds)
    return statistics.median(seconds), high - low
