"""gpt.py explain: what a part costs by its own count, what that allows on this machine, and what it takes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from attention_ext import PARTS, extension
from lab import counters, machine
from lab.bench.measure import Bench, Cell
from lab.costs import AVX2, Block, Costs
from lab.machine import Cache, size_text
from lab.timing import quartiles

REASONS = {
    "part0": "PyTorch multiplies, normalises and multiplies again; each step writes N x N numbers for every "
    "head and the next one reads them.",
    "part1": "Each query passes all of K, and each number of the output is a sum down a column of V: one "
    "number of every cache line is used, and the line has gone before the next one is wanted if V does not "
    "fit; each addition waits for the one before it; and only one lane of a vector works.",
    "part2": "The same three passes, but a tile of K or V serves 96 queries before it goes, and V is read "
    "along its rows. What is left is the N x N matrix of scores, written once and read twice.",
    "part3": "One row of scores at a time: it never leaves the cache, and the N x N matrix is gone. The "
    "price is that every query passes all of K and V again.",
    "part4": "A tile of Br queries shares each pass over K and V, and of the scores only a strip exists, "
    "which stays in the nearest caches. Nothing but Q, K, V and the output has to come from memory.",
}


@dataclass(frozen=True)
class Level:
    """A cache, what comes into it, and the bytes per second that it can take in."""

    cache: Cache
    counted: Costs
    bandwidth: float

    @property
    def traffic(self) -> float:
        """Bytes that come in."""
        return self.counted.traffic(self.cache.size)

    @property
    def keeps_all(self) -> bool:
        """Whether a second call would find all that it needs here."""
        return self.counted.traffic(math.inf) <= self.cache.size


def levels(counted: Costs, shared: Costs, threads: int) -> list[Level]:
    """Each cache of this machine with the bytes that come into it, and how fast they can.

    counted, shared: the costs for the caches that each thread has and for those, from the third level on,
    that all share. A level's bandwidth is what is read from a buffer that fits the next level but not this
    one, by so many threads at once.
    """
    caches = machine.caches()
    found = []
    for cache, beyond in [*pairwise(caches), (caches[-1], None)]:
        size = min(beyond.size // 2, 8 * cache.size) if beyond else 4 * cache.size
        bandwidth = machine.read_bandwidth(size, threads)
        found.append(Level(cache, counted if cache.level < 3 else shared, bandwidth))
    return found


def explain(cell: Cell, echo: Callable[[str], None], cachegrind: bool = False) -> None:
    """Print what a cell of one of PARTS costs, what bounds it and what it takes.

    cachegrind: simulate its cache misses too; else perf counts them, where it may.
    Raises ValueError where the part does not fit this machine, and as counters.misses() does.
    """
    if cachegrind and PARTS[cell.contender].operator is None:
        raise ValueError("--cachegrind goes with parts 1 to 4; PyTorch's kernels are not simulated")
    heads, its_block = cell.batch * cell.heads, block(cell.simd)
    # parts 1 and 2 have one thread, whatever there is
    threads = 1 if cell.contender in ("part1", "part2") else cell.threads
    counted = cell.costs(heads, threads, its_block)
    part = PARTS[cell.contender]
    tile = f", Br = {cell.br}, Bc = {cell.bc}" if part.tiled else ""
    mask, number = "causal" if cell.causal else "no mask", f"{cell.threads} thread{'s' * (cell.threads > 1)}"
    what = f"{heads} head{'s' * (heads > 1)} of N = {cell.N}, d = {cell.d}"
    echo(f"{part.name}, {part.summary}: {what}{tile}, {mask}, {number}")
    echo(machine.describe()["cpu"] + "\n")
    echo(textwrap.fill(REASONS[part.name], 100) + "\n")
    echo(f"arithmetic  {_count(counted.flops)}FLOP: 2 d for each query and key, for scores and for output")
    echo(f"scratch     {size_text(counted.scratch)}")
    bounds = levels(counted, cell.costs(heads, 1, its_block), threads)
    echo("\n" + traffic_table(counted, bounds))

    bench = Bench([cell])
    for _ in bench.run():
        pass
    run, result = bench.done, bench.done.results[0]
    if result.median is None:
        raise ValueError(f"{part.name} was not timed: {result.status}, {result.note}")
    peak = run.peaks[cell.threads] * threads / cell.threads
    scalar = cell.contender == "part1" or cell.simd == "off"
    echo("\n" + bound_text(counted, bounds, peak, block("auto").lanes if scalar else 1))
    q1, q3 = quartiles(result.counted)
    rate = counted.flops / result.median
    echo(
        f"measured    {1e3 * result.median:.3g} ms (IQR {1e3 * (q3 - q1):.2g}), {rate / 1e9:.3g} GFLOP/s = "
        f"{100 * rate / peak:.0f} % of the peak; scratch as allocated {size_text(result.scratch or 0)}"
    )
    if part.operator:
        echo(misses_text(cell, cachegrind))
    if run.busy:
        echo(run.busy)


def block(simd: str | None) -> Block:
    """What the helpers' product takes at a time, as they say."""
    return Block(*(extension.size(name, simd or "auto") for name in ("lanes", "panel", "rows")))


def misses_text(cell: Cell, cachegrind: bool) -> str:
    """The cache misses of one head on one thread, counted by perf or simulated by cachegrind."""
    caches = machine.caches()
    first, own = caches[0], caches[:2][-1]
    simd = "auto" if cell.simd == "ispc" else cell.simd or "auto"
    missed = counters.misses(
        cell.contender,
        cell.N,
        cell.d,
        br=cell.br or 1,
        bc=cell.bc or 1,
        causal=cell.causal,
        simd=simd,
        caches=(first, own) if cachegrind else None,
        timeout=600,
    )
    if missed.l1 is None and missed.last is None:
        return f"misses      not counted: {missed.note}" + "; --cachegrind simulates them" * (not cachegrind)
    simulated = cachegrind and counters.SIMULATED == "haswell"
    avx2 = simulated and simd != "off"  # whose plain loops have the tiles of 16 lanes everywhere
    expected = cell.costs(1, 1, AVX2 if avx2 else block(cell.simd))
    levels = (first, missed.l1), (own if cachegrind else caches[-1], missed.last)
    texts = [
        f"{size_text(found)} into L{cache.level}, by the count {size_text(expected.traffic(cache.size))}"
        for cache, found in levels
        if found is not None
    ]
    how = "simulated by cachegrind" + " for AVX2" * simulated if cachegrind else "counted by perf"
    return f"misses      of one head, {how}: {'; '.join(texts)}"


def traffic_table(counted: Costs, bounds: list[Level]) -> str:
    """Bytes of each matrix that come into each cache."""
    titles = [f"into L{b.cache.level} ({size_text(b.cache.size)})" for b in bounds]
    lines = ["moved       " + "".join(f"{title:>20}" for title in titles)]
    streams = [b.counted.streams for b in bounds]
    for i in range(len(counted.streams)):
        sizes = [size_text(by_level[i].traffic(b.cache.size)) for b, by_level in zip(bounds, streams)]
        lines.append(f"  {counted.streams[i].name:10}" + "".join(f"{size:>20}" for size in sizes))
    lines.append("  all       " + "".join(f"{size_text(b.traffic):>20}" for b in bounds))
    lines.append("FLOP / byte " + "".join(f"{counted.flops / b.traffic:>20.3g}" for b in bounds))
    return "\n".join(lines)


def bound_text(counted: Costs, bounds: list[Level], peak: float, unused: int) -> str:
    """The least time that each limit allows, and which is the longest.

    unused: of so many lanes of a vector only one is used. A cache that keeps all of a call's matrices limits
    only the first call, which is not timed.
    """
    limits = [("the FMA peak", f"{peak / 1e9:.0f} GFLOP/s", counted.flops / peak)]
    if unused > 1:
        scalar = peak / unused
        limits.append((f"one lane of {unused}", f"{scalar / 1e9:.1f} GFLOP/s", counted.flops / scalar))
    if counted.chained:
        latency = machine.fma_latency()
        each = f"{1e9 * latency:.2f} ns each"
        limits.append(("sums, one addition at a time", each, counted.chained * latency))
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
