"""gpt.py explain: the costs of a part by its own count, its bound on this machine, and its time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from attention_ext import PARTS, extension, processor
from attention_ext.parts import Dtype
from attention_ext.processor import Cache
from lab import counters, machine
from lab.bench.cases import Cell
from lab.bench.measure import Bench
from lab.bench.results import Result, Run
from lab.costs import Block, Costs, costs, scratch
from lab.machine import size_text
from lab.timing import quartiles

AMX_SOFTMAX_INSTRUCTIONS = 7.5  # instructions of part4_amx.cpp for a vector, without loads and stores
MISSES_SECONDS = 600  # time that one run under perf or cachegrind may take


@dataclass(frozen=True)
class Level:
    """A cache, the costs that are counted for it, and the bytes per second that it can take in."""

    cache: Cache
    counted: Costs
    bandwidth: float

    @property
    def traffic(self) -> float:
        """Bytes that come in."""
        return self.counted.traffic(self.cache.size)

    @property
    def keeps_all(self) -> bool:
        """Whether a second call would find all its data in this cache."""
        return self.counted.traffic(math.inf) <= self.cache.size


def levels(counted: Costs, shared: Costs, threads: int) -> list[Level]:
    """Each cache of this machine with the bytes that come into it and its bandwidth.

    counted: the costs for the caches of each thread. shared: those for the caches that all threads share,
    from the third level on. A level's bandwidth is that of reads by all threads from a buffer that fits the
    next level but not this one.
    """
    caches = processor.caches()
    found = []
    for cache, beyond in [*pairwise(caches), (caches[-1], None)]:
        size = min(beyond.size // 2, 8 * cache.size) if beyond else 4 * cache.size
        bandwidth = machine.read_bandwidth(size, threads)
        found.append(Level(cache, counted if cache.level < 3 else shared, bandwidth))
    return found


def explain(cell: Cell, echo: Callable[[str], None], cachegrind: bool = False) -> None:
    """Print the costs of a cell of one of PARTS, its bound and its time.

    cachegrind: simulate its cache misses; otherwise perf counts them if permitted.
    Raises ValueError if the part does not fit this machine, and the errors of counters.misses().
    """
    part = PARTS[cell.contender]
    if cachegrind and part.operator is None:
        raise ValueError("--cachegrind goes with parts that are kernels; PyTorch's are not simulated")
    if cachegrind and cell.dtype != Dtype.FP32:
        raise ValueError(f"--cachegrind goes with --dtype fp32; {cell.dtype} is not simulated")
    echo(heading(cell) + "\n")
    echo(textwrap.fill(part.why, 100) + "\n")
    threads = cell.threads if part.threaded else 1
    case, block = cell.case(threads=threads), Block.of(cell.simd)
    echo(f"arithmetic  {_count(case.flops)}FLOP: 2 d for each query and key, for scores and for output")
    echo(f"scratch     {size_text(scratch(part.name, case, cell.simd))}")
    if line := softmax_text(cell):
        echo(line)
    counted, of_one_thread = (costs(part.name, each, block) for each in (case, replace(case, threads=1)))
    bounds = []
    if counted and of_one_thread:
        bounds = levels(counted, of_one_thread, threads)
        echo("\n" + traffic_table(counted, bounds))
    else:
        where = "" if cell.dtype == Dtype.FP32 else f" in {cell.dtype}"
        echo(f"\nmoved       not counted for {part.name}{where}")

    run, result = measured(cell)
    peak = run.peak(cell) * threads / cell.threads
    scalar = counted is not None and counted.scalar or cell.simd == "off"
    lanes = Block.of("auto").lanes if scalar else 1
    unit = "AMX" if by_amx(cell) else "FMA"
    echo("\n" + bound_text(case.flops, counted.chained if counted else 0.0, bounds, peak, lanes, unit))
    echo(measured_text(case.flops, result, peak))
    if part.operator and cell.dtype == Dtype.FP32:
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
        softmax, products = AMX_SOFTMAX_INSTRUCTIONS / 2, cell.d / 16
        share = f"{100 * products / (products + softmax):.0f} %"
        counted = f"{AMX_SOFTMAX_INSTRUCTIONS} instructions for a vector of scores, two a cycle"
        return (
            f"softmax     {counted}, beside\n"
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


def heading(cell: Cell) -> str:
    """The part, the case and the processor."""
    part, heads = PARTS[cell.contender], cell.batch * cell.heads
    tile = f", Br = {cell.br}, Bc = {cell.bc}" if part.tiled else ""
    mask, number = "causal" if cell.causal else "no mask", f"{cell.threads} thread{'s' * (cell.threads > 1)}"
    what = f"{heads} head{'s' * (heads > 1)} of N = {cell.N}, d = {cell.d}"
    return f"{part.name}, {part.summary}: {what}{tile}, {mask}, {number}\n{processor.name()}"


def measured(cell: Cell) -> tuple[Run, Result]:
    """A run of this cell alone, and its result. Raises ValueError if it could not be timed."""
    bench = Bench([cell])
    for _ in bench.run():
        pass
    result = bench.done.results[0]
    if result.median is None:
        raise ValueError(f"{cell.contender} was not timed: {result.status}, {result.note}")
    return bench.done, result


def measured_text(flops: float, result: Result, peak: float) -> str:
    """The median, its spread, and the share of the peak."""
    assert result.median is not None
    q1, q3 = quartiles(result.counted)
    rate = flops / result.median
    return (
        f"measured    {1e3 * result.median:.3g} ms (IQR {1e3 * (q3 - q1):.2g}), {rate / 1e9:.3g} GFLOP/s = "
        f"{100 * rate / peak:.0f} % of the peak; scratch as allocated {size_text(result.scratch or 0)}"
    )


def misses_text(cell: Cell, cachegrind: bool) -> str:
    """The cache misses of one head on one thread, counted by perf or simulated by cachegrind."""
    caches = processor.caches()
    first, own = caches[0], caches[:2][-1]
    simd = "auto" if cell.simd == "ispc" else cell.simd or "auto"
    call = counters.Call(
        cell.contender, cell.N, cell.d, br=cell.br or 1, bc=cell.bc or 1, causal=cell.causal, simd=simd
    )
    missed = counters.misses(call, (first, own) if cachegrind else None, timeout=MISSES_SECONDS)
    if missed.l1 is None and missed.last is None:
        return f"misses      not counted: {missed.note}" + "; --cachegrind simulates them" * (not cachegrind)
    for_avx2 = cachegrind and counters.SIMULATED == "haswell"
    # 'off' has the tiles of 16 lanes on every processor
    block = (
        counters.simulated_block(Block.of(cell.simd)) if for_avx2 and simd != "off" else Block.of(cell.simd)
    )
    expected = costs(cell.contender, cell.case(heads=1, threads=1), block)
    levels = (first, missed.l1), (own if cachegrind else caches[-1], missed.last)
    texts = []
    for cache, found in levels:
        if found is not None:
            count = f", by the count {size_text(expected.traffic(cache.size))}" if expected else ""
            texts.append(f"{size_text(found)} into L{cache.level}{count}")
    how = "simulated by cachegrind" + " for AVX2" * for_avx2 if cachegrind else "counted by perf"
    return f"misses      of one head, {how}: {'; '.join(texts)}"


def traffic_table(counted: Costs, bounds: list[Level]) -> str:
    """A table of the bytes of each matrix that come into each cache."""
    titles = [f"into L{b.cache.level} ({size_text(b.cache.size)})" for b in bounds]
    lines = ["moved       " + "".join(f"{title:>20}" for title in titles)]
    streams = [b.counted.streams for b in bounds]
    for i in range(len(counted.streams)):
        sizes = [size_text(by_level[i].traffic(b.cache.size)) for b, by_level in zip(bounds, streams)]
        lines.append(f"  {counted.streams[i].name:10}" + "".join(f"{size:>20}" for size in sizes))
    lines.append("  all       " + "".join(f"{size_text(b.traffic):>20}" for b in bounds))
    lines.append("FLOP / byte " + "".join(f"{counted.flops / b.traffic:>20.3g}" for b in bounds))
    return "\n".join(lines)


def bound_text(flops: float, chained: float, bounds: list[Level], peak: float, lanes: int, unit: str) -> str:
    """The least time that each limit allows, and the limit with the longest time.

    chained: multiply-adds that wait for the one before. lanes: number of lanes of a vector, of which one is
    used. unit: the unit of the peak. A cache that keeps all matrices of a call limits only the first call,
    which is not timed.
    """
    limits = [(f"the {unit} peak", f"{peak / 1e9:.0f} GFLOP/s", flops / peak)]
    if lanes > 1:
        scalar = peak / lanes
        limits.append((f"one lane of {lanes}", f"{scalar / 1e9:.1f} GFLOP/s", flops / scalar))
    if chained:
        latency = machine.fma_latency()
        each = f"{1e9 * latency:.2f} ns each"
        limits.append(("sums, one addition at a time", each, chained * latency))
    limits += [
        (f"filling L{b.cache.level}", f"{b.bandwidth / 1e9:.0f} GB/s", b.traffic / b.bandwidth)
        for b in bounds
        if not b.keeps_all
    ]
    slowest = max(limits, key=lambda limit: limit[2])
    lines = [
        f"{'at least' if i == 0 else '':12}{1e3 * seconds:.3g} ms for {name} ({rate})"
        for i, (name, rate, seconds) in enumerate(limits)
    ]
    return "\n".join([*lines, f"bound by    {slowest[0]}"])


def _count(number: float) -> str:
    """537e6 as '0.537 G', with the unit's letter."""
    return f"{number / 1e9:.3g} G" if number >= 1e8 else f"{number / 1e6:.3g} M"
