"""gpt.py explain: the costs of a part by its own count, its bound on a device, and its time there."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from shakespeare.attention_ext import extension, processor
from shakespeare.attention_ext.build.nvrtc import Resources
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import BACKWARD, WIDEST, choose, queries_of
from shakespeare.attention_ext.cuda.launches import Compiled, Kernel, Sizes
from shakespeare.attention_ext.parts import BuildError, Dtype, check_compatible, check_part
from shakespeare.attention_ext.processor import Cache
from shakespeare.attention_ext.webgpu.steps import STEPS
from shakespeare.attention_ext.webgpu.steps import choose as choose_step
from shakespeare.lab import counters, machine, rule_options
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.contenders import CUDA_CONTENDERS
from shakespeare.lab.bench.gpu_bench import GpuBench
from shakespeare.lab.bench.plan import check_memory
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.bench.runner import Bench, inputs
from shakespeare.lab.bench.sweep import MIN_TIME_SECONDS, ROUNDS
from shakespeare.lab.cuda import architectures
from shakespeare.lab.cuda.architectures import SHEETS, WARP, architecture, occupancy
from shakespeare.lab.cuda.traffic import WAVEFRONT, Count, Shared, counts
from shakespeare.lab.formats import counted, markdown, scaled, size_text
from shakespeare.lab.scratch import block_of, scratch
from shakespeare.lab.timing import in_turns, quartiles
from shakespeare.lab.traffic import FLOAT_BYTES, Case, Stream, streams, traffic
from shakespeare.lab.webgpu.device import Gpu, prepared
from shakespeare.lab.webgpu.traffic import step_counts

AMX_SOFTMAX_INSTRUCTIONS = 7.5  # instructions of part4_amx.cpp for a vector, without loads and stores
SCALAR = ("part1",)  # parts that use one lane of a vector, and sum each output in one chain of additions
OVERLAPPED_MULTIPLY_ADDS = 128  # most multiply-adds of the next sum that begin before a sum ends
MISSES_SECONDS = 600  # time that one run under perf or cachegrind may take
LONGEST = 2**24  # N on CUDA; counting goes over the tiles
ORDER = ("Q", "dO", "K", "S", "P", "V", "m, l, O", "O", "dQ, dK, dV")  # rows of CUDA's table
PROFILED = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum,dram__bytes.sum"
STEP_TITLES = "step|tile|multiply-adds|exp2|workgroup memory|storage|predicted, ms|bound by|measured, ms"

TIMED_CALLS = 5  # calls of a step that are timed
SUBGROUP = 32  # lanes of a GPU that read a number of workgroup memory at once, about; of a CPU it is one

Echo = Callable[[str], None]
Limit = tuple[str, str, float]  # its name, its rate as text, and the least seconds that it allows


def explain(
    cell: Cell,
    echo: Echo,
    cachegrind: bool = False,
    kernel: str | None = None,
    arch: str | None = None,
) -> None:
    """Print a cell's costs, bound and time.

    cachegrind: simulate a CPU's misses; else perf counts them. kernel: of CUDA or WebGPU; None for the
    fastest, and all steps. arch: a key of SHEETS, None for this machine's GPU. Raises ValueError for refused
    arguments, BuildError without a compiler or a GPU, and the errors of counters.misses().
    """
    if cell.device == "cuda":
        on_cuda(cell, echo, kernel, arch)
    elif cell.device == "webgpu":
        on_webgpu(cell, echo, kernel)
    else:
        on_cpu(cell, echo, cachegrind)


def case_text(cell: Cell) -> str:
    """The sizes of a cell."""
    rows = ""
    if cell.queries != cell.N:
        rows = f"{cell.queries} {'query' if cell.queries == 1 else 'queries'} and "
    on_cpu = cell.device == "cpu"
    words = (
        f"{counted(cell.batch * cell.heads, 'head')} of {rows}N = {cell.N}, d = {cell.d}",
        f"Br = {cell.br}, Bc = {cell.bc}" if cell.br else "",
        "" if on_cpu else cell.dtype,
        "causal" if cell.causal else "no mask",
        cell.rules,
        counted(cell.threads, "thread") if on_cpu else "",
    )
    return ", ".join(filter(None, words))


def arithmetic_text(flops: float, what: str = "scores and for output") -> str:
    """The operations of a call."""
    return f"arithmetic  {scaled(flops)}FLOP: 2 d for each query and key, for {what}"


def columns(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table with a title for each row."""
    return "\n".join(f"{title:12}" + "".join(f"{text:>20}" for text in texts) for title, texts in rows)


def bound_text(limits: Sequence[Limit]) -> str:
    """The least time that each limit allows, and the limit with the longest time."""
    lines = [
        f"{'at least' if i == 0 else '':12}{1e3 * seconds:.3g} ms for {name} ({rate})"
        for i, (name, rate, seconds) in enumerate(limits)
    ]
    return "\n".join([*lines, f"bound by    {max(limits, key=lambda limit: limit[2])[0]}"])


def measured(cell: Cell) -> tuple[Run, Result]:
    """A run of this cell alone, and its result. Raises ValueError if it could not be timed."""
    bench = (Bench if cell.device == "cpu" else GpuBench)([cell], ROUNDS, MIN_TIME_SECONDS)
    list(bench.run())
    (result,) = bench.done.results
    if result.median is None:
        raise ValueError(f"{cell.contender} was not timed: {result.status}, {result.note}")
    return bench.done, result


def measured_text(result: Result, peak: float, name: str = "the peak") -> str:
    """The median, its spread, and the share of the peak, of this name."""
    assert result.median is not None
    q1, q3 = quartiles(result.counted)
    rate = result.cell.flops / result.median
    size, unit = (1e9, "GFLOP/s") if result.cell.device == "cpu" else (1e12, "TFLOP/s")
    shown = f"{rate / size:.3g} {unit} = {100 * rate / peak:.0f} % of {name}"
    return f"measured    {1e3 * result.median:.3g} ms (IQR {1e3 * (q3 - q1):.2g}), {shown}"


class Level(NamedTuple):
    """A cache, the streams that come into it, their bytes, and the bytes per second that it can take in."""

    cache: Cache
    streams: list[Stream]
    traffic: float
    bandwidth: float


def levels(part: str, case: Case, simd: str | None) -> list[Level]:
    """Each cache of this machine with the streams that come into it; none if they are not counted.

    From the third level on, all threads share a cache. A level's bandwidth is that of reads by all threads
    from a buffer that fits the next level but not this one.
    """
    bounds = []
    caches = processor.caches()
    for cache, beyond in [*pairwise(caches), (caches[-1], None)]:
        thread_case = case if cache.level < 3 else replace(case, threads=1)
        come_in = streams(part, thread_case, block_of(simd)) if case.dtype is Dtype.FP32 else None
        if come_in is None:
            return []
        size = min(beyond.size // 2, 8 * cache.size) if beyond else 4 * cache.size
        bandwidth = machine.read_bandwidth(size, case.threads)
        bounds.append(Level(cache, come_in, traffic(come_in, cache.size), bandwidth))
    return bounds


def on_cpu(cell: Cell, echo: Echo, cachegrind: bool) -> None:
    """A part on this processor. For the arguments and the errors see explain()."""
    part = check_part(cell.contender)
    compiled = part.operator or part.file and part.file.suffix in (".cpp", ".ispc")
    if cachegrind and not compiled:
        raise ValueError("--cachegrind goes with parts that are kernels; PyTorch's are not simulated")
    if cachegrind and cell.dtype != Dtype.FP32:
        raise ValueError(f"--cachegrind goes with --dtype fp32; {cell.dtype} is not simulated")
    if cachegrind and cell.rules:
        raise ValueError(f"--cachegrind does not go with rules; {cell.rules} is not simulated")
    echo(f"{part.name}, {part.summary}: {case_text(cell)}\n{processor.name()}\n")
    if part.why:
        echo(textwrap.fill(part.why, 100) + "\n")
    case = cell.case(threads=cell.threads if part.threaded else 1)
    echo(arithmetic_text(case.flops))
    if cell.rules:
        echo(skipped_text(cell))
    echo(f"scratch     {size_text(scratch(part.name, case, cell.simd))}")
    softmax = softmax_text(cell)
    if softmax:
        echo(softmax)
    bounds = levels(part.name, case, cell.simd)
    if bounds:
        echo("\n" + traffic_table(case.flops, bounds))
    else:
        where = "" if cell.dtype == Dtype.FP32 else f" in {cell.dtype}"
        echo(f"\nmoved       not counted for {part.name}{where}")

    run, result = measured(cell)
    peak = run.peak(cell) * case.threads / cell.threads
    echo("\n" + bound_text(limits(cell, case, bounds, peak)))
    allocated = "" if result.scratch is None else f"; scratch as allocated {size_text(result.scratch)}"
    echo(measured_text(result, peak) + allocated)
    if compiled and cell.dtype == Dtype.FP32 and not cell.rules:
        echo(misses_text(cell, cachegrind))
    if run.busy:
        echo(run.busy)


def by_amx(cell: Cell) -> bool:
    """Whether AMX computes this cell."""
    return cell.contender == "part4" and cell.by_amx and extension.uses_amx(cell.queries, cell.simd or "auto")


def softmax_text(cell: Cell) -> str | None:
    """The instructions of part 4's softmax and the share of the peak that they leave; else None."""
    if cell.contender != "part4":
        return None
    if by_amx(cell):
        # two instructions in a cycle; a product of 16 x 32 by 32 x 16 takes 16 cycles
        products = cell.d / 16
        share = f"{100 * products / (products + AMX_SOFTMAX_INSTRUCTIONS / 2):.0f} %"
        cost = f"{AMX_SOFTMAX_INSTRUCTIONS} instructions for a vector of scores, two a cycle"
        return (
            f"softmax     {cost}, beside\n"
            f"            d / 16 = {products:g} cycles of AMX: {share} of its peak where they do not overlap"
        )
    size = extension.size("softmax", cell.simd or "auto")
    if not size:
        return None
    products = 2 * cell.d
    return (
        f"softmax     {size} instructions for a vector of scores, beside 2 d = {products} multiply-adds: "
        f"at most {100 * products / (products + size):.0f} % of the peak if they share ports, as Intel's do"
    )


def misses_text(cell: Cell, cachegrind: bool) -> str:
    """The cache misses of one head on one thread, counted by perf or simulated by cachegrind."""
    caches = processor.caches()
    pair = (caches[0], caches[:2][-1]) if cachegrind else (caches[0], caches[-1])
    simd = "auto" if cell.simd == "ispc" else cell.simd or "auto"
    case = cell.case(heads=1, threads=1)
    block = block_of(cell.simd)
    missed = counters.misses(cell.contender, case, simd, pair if cachegrind else None, MISSES_SECONDS)
    if missed.l1 is None and missed.last is None:
        otherwise = "" if cachegrind else "; --cachegrind simulates them"
        return f"misses      not counted: {missed.note}{otherwise}"
    how = "counted by perf"
    if cachegrind:
        how = "simulated by cachegrind"
        if counters.SIMULATED == "haswell":
            how += " for AVX2"
            if simd != "off":  # which has the tiles of 16 lanes on every processor
                block = counters.simulated_block(block)
    expected = streams(cell.contender, case, block)
    texts = [
        f"{size_text(moved)} into L{cache.level}"
        + (f", by the count {size_text(traffic(expected, cache.size))}" if expected else "")
        for cache, moved in zip(pair, (missed.l1, missed.last))
        if moved is not None
    ]
    return f"misses      of one head, {how}: {'; '.join(texts)}"


def traffic_table(flops: float, bounds: list[Level]) -> str:
    """A table of the bytes of each matrix that come into each cache."""
    rows = [("moved", [f"into L{b.cache.level} ({size_text(b.cache.size)})" for b in bounds])]
    for same in zip(*(b.streams for b in bounds)):
        sizes = [size_text(stream.traffic(b.cache.size)) for b, stream in zip(bounds, same)]
        rows.append((f"  {same[0].name}", sizes))
    rows.append(("  all", [size_text(b.traffic) for b in bounds]))
    rows.append(("FLOP / byte", [f"{flops / b.traffic:.3g}" for b in bounds]))
    return columns(rows)


def limits(cell: Cell, case: Case, levels: list[Level], peak: float) -> list[Limit]:
    """The limits of a call, first the peak of the arithmetic. A cache that holds all matrices is no limit."""
    unit = "AMX" if by_amx(cell) else "FMA"
    bounds = [(f"the {unit} peak", f"{peak / 1e9:.0f} GFLOP/s", case.flops / peak)]
    scalar = bool(levels) and cell.contender in SCALAR
    if scalar or cell.simd == "off":
        lanes = block_of("auto").lanes
        rate = peak / lanes
        bounds.append((f"one lane of {lanes}", f"{rate / 1e9:.1f} GFLOP/s", case.flops / rate))
    if scalar and case.seen > OVERLAPPED_MULTIPLY_ADDS:
        # The sums over the keys; those of the scores are short, so several are in progress at a time.
        waiting = case.heads * case.Nq * (case.seen - OVERLAPPED_MULTIPLY_ADDS) * case.d
        latency = machine.fma_latency()
        bounds.append(("sums, one addition at a time", f"{1e9 * latency:.2f} ns each", waiting * latency))
    for b in levels:
        if traffic(b.streams, math.inf) > b.cache.size:
            speed = f"{b.bandwidth / 1e9:.0f} GB/s"
            bounds.append((f"filling L{b.cache.level}", speed, b.traffic / b.bandwidth))
    return bounds


def skipped_text(cell: Cell) -> str:
    """What a part skips by the rules of a cell, and what that saves."""
    without = replace(cell, rules=None)
    saved = f"{scaled(without.flops)}FLOP without rules"
    if not check_part(cell.contender).operator:
        return f"skipped     nothing: all scores are computed, and some are hidden; {saved}"
    seen = sum(map(len, cell.seen))
    if not (cell.br and cell.bc):
        pairs = 100 - 100 * seen / sum(map(len, without.seen))
        return f"skipped     {pairs:.3g} % of the pairs of a query and a key; {saved}"
    ruled, all_keys = (list(map(len, rule_options.together(each.seen, cell.br))) for each in (cell, without))
    tiles, all_tiles = (sum(-(-keys // cell.bc) for keys in each) for each in (ruled, all_keys))
    row = cell.batch * cell.heads * 2 * FLOAT_BYTES * cell.d
    return (
        f"skipped     {all_tiles - tiles} of {all_tiles} tiles of {cell.br} x {cell.bc}; {saved}\n"
        f"            {size_text(row * sum(ruled))} of K and V for the tiles that are read, "
        f"{size_text(row * sum(all_keys))} without rules\n"
        f"            {100 * seen / computed(cell):.3g} % of the scores computed are seen"
    )


def computed(cell: Cell) -> int:
    """The scores of a head that part 4 computes: a strip's queries begin together, and end by vectors."""
    seen = cell.seen
    block = block_of(cell.simd)
    count = 0
    assert cell.br
    for i in range(0, cell.N, cell.br):
        for r in range(i, min(i + cell.br, cell.N), block.panel):
            strip = seen[r : min(r + block.panel, i + cell.br)]
            rows = len(strip) if "documents" in str(cell.rules) else block.lanes
            begin = min(keys.start for keys in strip)
            ends = rule_options.together(strip, rows)
            count += sum(ends[n // rows].stop - begin for n in range(len(strip)))
    return count


@dataclass(frozen=True)
class Answer:
    """A kernel for a cell on CUDA, compiled.

    driver: the GPU's driver said so, not a data sheet. fits: blocks that each resource of a multiprocessor
    allows. blocks: those resident.
    """

    kernel: Compiled
    driver: bool
    resources: Resources
    fits: dict[str, int]
    blocks: int
    count: Count


def on_cuda(cell: Cell, echo: Echo, kernel: str | None, arch: str | None) -> None:
    """A kernel of part 4 on a GPU. For the arguments and the errors see explain()."""
    answer = compiled(cell, kernel, arch)
    row = answer.kernel.row
    name = next(name for name, known in CUDA_CONTENDERS.items() if known.name == row.name)
    cell = replace(cell, contender=name, backward=row.name in BACKWARD)
    on = answer.kernel.on
    echo(
        f"part4, kernel {row.name}, {row.summary}: {case_text(cell)}\n"
        f"{on.name}, {on.multiprocessors} multiprocessors at up to {on.hertz / 1e9:.2f} GHz, "
        f"{on.bandwidth / 1e12:.2f} TB/s, L2 {size_text(on.l2)}"
        + ("" if answer.driver else ", by its data sheet")
        + f"\n\n{textwrap.fill(row.why, 100)}\n"
    )
    echo(arithmetic_text(cell.flops, "five products" if cell.backward else "scores and for output"))
    echo(resources_text(answer) + "\n\n" + moved_table(answer))
    if not answer.count.shared:
        echo(f"  A profiler counts what passes through shared memory:\n  {profiler_command(cell, row)}")
    limits = gpu_limits(cell, answer)
    echo("\n" + bound_text(limits))
    if not answer.driver:
        echo("measured    not: this is counted for an architecture, without a GPU")
        return
    run, result = measured(replace(cell, l2="warm"))
    peak, _, seconds = limits[0]
    echo(measured_text(result, cell.flops / seconds, peak))
    if run.busy:
        echo(run.busy)


def profiler_command(cell: Cell, row: Kernel) -> str:
    """The command for Nsight Compute that counts a launch of a kernel's first function; all of gradients."""
    functions = "regex:attention_backward" if cell.backward else row.functions[0]
    command = f"python gpt.py explain part4 --device cuda --kernel {row.name} --dtype {cell.dtype}"
    sizes = f"-B {cell.batch} --heads {cell.heads} -N {cell.N} --queries {cell.queries} -d {cell.d}"
    causal = " --causal" if cell.causal else ""
    launches = 3 if cell.backward else 1
    return f"ncu --metrics {PROFILED} -k {functions} -c {launches} {command} {sizes}{causal}"


def compiled(cell: Cell, name: str | None = None, arch: str | None = None) -> Answer:
    """The requested kernel, compiled for the GPU. For the arguments and the errors see explain()."""
    dtype = check_compatible("part4", "cuda", cell.dtype)
    Nk = cell.N
    for what, size, limit in (("d", cell.d, WIDEST), ("N", Nk, LONGEST)):
        if size > limit:
            raise ValueError(f"{what} is {size}; it must be at most {limit} on CUDA")
    if cell.queries > (Nk if cell.causal else LONGEST):
        allowed = f"N={Nk} with a causal mask" if cell.causal else str(LONGEST)
        raise ValueError(f"queries is {cell.queries}; it must be at most {allowed}")
    if arch is None:
        try:
            driver.check_gpu()
        except BuildError as error:
            raise BuildError(f"{error}; --arch {'|'.join(SHEETS)} explains a kernel without a GPU") from None
        index = torch.cuda.current_device()
        on = driver.gpu(index)
    else:
        on = SHEETS[arch]
    queries = queries_of(Sizes(cell.batch * cell.heads, cell.queries, Nk), dtype, on)
    row, tile = choose(name, cell.d, dtype, on, queries)
    _, resources = driver.source(row, tile, cell.d, dtype, on.capability).compile()
    fits = occupancy(architecture(on), tile.threads, resources.registers, tile.shared + resources.shared)
    blocks = min(fits.values())
    if arch is None:
        torch.cuda.synchronize(index)  # makes the GPU's context current
        kernel = driver.load(row, tile, cell.d, dtype, index)
        blocks = driver.resident(kernel)
    else:
        kernel = Compiled(row, tile, row.padded(cell.d), on, None, dict.fromkeys(row.functions, 0))
    count = counts(cell.case(), kernel, blocks * on.multiprocessors)
    return Answer(kernel, arch is None, resources, fits, blocks, count)


def resources_text(answer: Answer) -> str:
    """The resources of a launch: blocks, registers, spills, shared memory, occupancy."""
    tile = answer.kernel.tile
    used = answer.resources
    fits = answer.fits
    launches = f" in {answer.count.launches:,} launches" if answer.count.launches > 1 else ""
    spilled = f"{used.spill_stores} B stored, {used.spill_loads} B loaded" if used.spill_stores else "none"
    resident = f"{counted(answer.blocks, 'block')} a multiprocessor"
    warps = answer.blocks * -(-tile.threads // WARP)
    max_warps = architecture(answer.kernel.on).warps
    share = f"{warps} of {max_warps} warps = {100 * warps / max_warps:.0f} %"
    others = ", ".join(f"{number} by {name}" for name, number in fits.items())
    source = "by the driver" if answer.driver else "counted from ptxas's report"
    fewest = min(fits.values())
    bound = ""
    if answer.blocks == fewest:
        bound = f", limited by {' and '.join(name for name, number in fits.items() if number == fewest)}"
    return (
        f"launch      {answer.count.blocks:,} blocks{launches} of {tile.threads} threads; "
        f"tiles of {tile.br} queries and {tile.bc} keys\n"
        f"registers   {used.registers} a thread; spilled: {spilled}; stack {used.stack} B\n"
        f"shared      {size_text(tile.shared + used.shared)} a block\n"
        f"occupancy   {resident} ({source}), {share}{bound}\n"
        f"            blocks that fit: {others}"
    )


def moved_table(answer: Answer) -> str:
    """Bytes of each matrix through shared memory, over the fewest possible, and through global memory."""
    count = answer.count
    l2 = answer.kernel.on.l2
    titles = ("shared memory", "over the fewest", "global memory", f"past L2 ({size_text(l2)})")
    shared = {each.name: each for each in count.shared}
    moved = {stream.name: (stream.traffic(1), stream.traffic(l2)) for stream in count.streams}
    rows = [(name, shared.get(name), moved.get(name, (0, 0))) for name in ORDER if name in {*shared, *moved}]
    fewest = sum(each.fewest for each in count.shared)
    total = Shared("all", count.wavefronts, fewest) if shared else None
    rows.append(("all", total, (count.from_memory(1), count.from_memory(l2))))
    lines: list[tuple[str, Sequence[str]]] = [("moved", titles)]
    for name, near, far in rows:
        texts = ["-", "-"]
        if near:
            texts = [size_text(WAVEFRONT * near.wavefronts), f"{near.wavefronts / near.fewest:.3g} x"]
        lines.append((f"  {name}", (*texts, *(size_text(size) if size else "-" for size in far))))
    return columns(lines)


def gpu_limits(cell: Cell, answer: Answer) -> list[Limit]:
    """The limits on CUDA; the arithmetic's peak is the first."""
    on = answer.kernel.on
    count = answer.count

    def rate(clock: float) -> float:
        return architectures.rate(on, clock)

    peak = rate(2 * architecture(on).fma)
    unit = "FMA"
    products = ""
    if answer.kernel.tile.tensor:
        unit = "tensor"
        peak = rate(architecture(on).tensor)
        if cell.dtype == Dtype.FP32:  # three products of tf32, at half the rate of bfloat16
            peak /= 6
            products = ", in three products of tf32"
    if cell.backward and answer.kernel.tile.exponentials > 1:  # P is computed in both passes
        peak *= 5 / 7
        products += ", seven products for five"
    limits = [(f"the {unit} peak", f"{peak / 1e12:.4g} TFLOP/s{products}", cell.flops / peak)]
    if count.shared:
        shared = rate(architectures.SHARED_BYTES)
        limits.append(("shared memory", f"{shared / 1e12:.3g} TB/s", WAVEFRONT * count.wavefronts / shared))
    exponentials = rate(architectures.EXPONENTIALS)
    many = f"{scaled(count.exponentials)} of them, {exponentials / 1e12:.3g} T a second"
    limits.append(("exponentials", many, count.exponentials / exponentials))
    if on.bandwidth:  # some drivers give no clock of the memory
        limits.append(("memory", f"{on.bandwidth / 1e12:.3g} TB/s", count.from_memory(on.l2) / on.bandwidth))
    return limits


def on_webgpu(cell: Cell, echo: Echo, kernel: str | None) -> None:
    """A row for each step, or one, and the adapter's limits. For arguments and errors see explain()."""
    dtype = check_compatible("part4", "webgpu", cell.dtype)
    on = Gpu()
    if cell.d > WIDEST:
        raise ValueError(f"d is {cell.d}; it must be at most {WIDEST} on WebGPU")
    check_memory([cell])
    adapter = on.gpu.adapter
    runnable = [name for name, step in STEPS.items() if not step.lacks(adapter)]
    steps = [choose_step(name, cell.d, dtype, adapter) for name in ([kernel] if kernel else runnable)]
    peak = on.fma_peak()
    rates = {
        "multiply-adds": peak / 2,
        "exp2": on.exponentials,
        "workgroup memory": on.workgroup_bandwidth,
        "storage": on.bandwidth,
    }
    slow = ": a CPU, which is right and never fast" if adapter.is_cpu else ""
    echo(
        f"part4 on WebGPU: {case_text(cell)}\n{adapter.name}, {adapter.backend}{slow}\n"
        f"limits, measured: {scaled(peak)}FLOP/s, {scaled(on.exponentials)} exp2/s, "
        f"workgroup memory {scaled(on.workgroup_bandwidth)}B/s, "
        f"storage {scaled(on.bandwidth)}B/s\n"
    )
    q, k, v = inputs(cell)
    rows = []
    for step, tile in steps:
        counts = step_counts(step, tile, cell, 1 if adapter.is_cpu else SUBGROUP)
        bounds = {name: count / rates[name] for name, count in counts.items()}
        bound = max(bounds, key=lambda name: bounds[name])
        call = prepared(q, k, v, cell.causal, step.name)
        (samples,) = in_turns([call], TIMED_CALLS, clock=on)
        multiply_adds, exponentials, *bytes_moved = counts.values()
        operations = (scaled(count) for count in (multiply_adds, exponentials))
        times = f"{1e3 * bounds[bound]:.3g}", bound, f"{1e3 * samples.median:.3g}"
        tile_text = f"{tile.br} x {tile.bc}, {tile.threads} threads"
        rows.append((step.name, tile_text, *operations, *map(size_text, bytes_moved), *times))
    echo(markdown(STEP_TITLES.split("|"), rows))
    for step, _ in steps:
        echo(f"\n{step.name}: {step.summary}. {step.why}")
