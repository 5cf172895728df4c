"""gpt.py explain: the costs of a part by its own count, its bound on this machine, and its time."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from shakespeare.attention_ext import extension, processor
from shakespeare.attention_ext.parts import Dtype, check_part
from shakespeare.attention_ext.processor import Cache
from shakespeare.lab import counters, machine, rules
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.measure import Bench
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.costs import block_of, scratch
from shakespeare.lab.text import counted, scaled, size_text
from shakespeare.lab.timing import quartiles
from shakespeare.lab.traffic import FLOAT_BYTES, Case, Stream, streams, traffic

AMX_SOFTMAX_INSTRUCTIONS = 7.5  # instructions of part4_amx.cpp for a vector, without loads and stores
SCALAR = ("part1",)  # parts that use one lane of a vector, and sum each output in one chain of additions
OVERLAPPED_MULTIPLY_ADDS = 128  # most multiply-adds of the next sum that begin before a sum ends
MISSES_SECONDS = 600  # time that one run under perf or cachegrind may take

Limit = tuple[str, str, float]  # its name, its rate as text, and the least seconds that it allows


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
    bounds, caches = [], processor.caches()
    for cache, beyond in [*pairwise(caches), (caches[-1], None)]:
        of_threads = case if cache.level < 3 else replace(case, threads=1)
        come_in = streams(part, of_threads, block_of(simd)) if case.dtype is Dtype.FP32 else None
        if come_in is None:
            return []
        size = min(beyond.size // 2, 8 * cache.size) if beyond else 4 * cache.size
        bandwidth = machine.read_bandwidth(size, case.threads)
        bounds.append(Level(cache, come_in, traffic(come_in, cache.size), bandwidth))
    return bounds


def explain(cell: Cell, echo: Callable[[str], None], cachegrind: bool = False) -> None:
    """Print a cell's costs, bound and time. cachegrind: simulate its misses; else perf counts them.

    Raises ValueError if the part does not fit this machine, and the errors of counters.misses().
    """
    part = check_part(cell.contender)
    compiled = part.operator or part.file and part.file.suffix in (".cpp", ".ispc")
    if cachegrind and not compiled:
        raise ValueError("--cachegrind goes with parts that are kernels; PyTorch's are not simulated")
    if cachegrind and cell.dtype != Dtype.FP32:
        raise ValueError(f"--cachegrind goes with --dtype fp32; {cell.dtype} is not simulated")
    if cachegrind and cell.rules:
        raise ValueError(f"--cachegrind does not go with rules; {cell.rules} is not simulated")
    echo(heading(cell) + "\n")
    if part.why:
        echo(textwrap.fill(part.why, 100) + "\n")
    case = cell.case(threads=cell.threads if part.threaded else 1)
    echo(arithmetic_text(case, case.flops))
    if cell.rules:
        echo(skipped_text(cell))
    echo(f"scratch     {size_text(scratch(part.name, case, cell.simd))}")
    if line := softmax_text(cell):
        echo(line)
    if bounds := levels(part.name, case, cell.simd):
        echo("\n" + traffic_table(case.flops, bounds))
    else:
        where = "" if cell.dtype == Dtype.FP32 else f" in {cell.dtype}"
        echo(f"\nmoved       not counted for {part.name}{where}")

    run, result = measured(cell)
    peak = run.peak(cell) * case.threads / cell.threads
    echo("\n" + bound_text(limits(cell, case, bounds, peak)))
    echo(measured_text(case.flops, result, peak))
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
        softmax, products = AMX_SOFTMAX_INSTRUCTIONS / 2, cell.d / 16
        share = f"{100 * products / (products + softmax):.0f} %"
        counted = f"{AMX_SOFTMAX_INSTRUCTIONS} instructions for a vector of scores, two a cycle"
        return (
            f"softmax     {counted}, beside\n"
            f"            d / 16 = {products:g} cycles of AMX: {share} of its peak where they do not overlap"
        )
    if not (size := extension.size("softmax", cell.simd or "auto")):
        return None
    products = 2 * cell.d
    return (
        f"softmax     {size} instructions for a vector of scores, beside 2 d = {products} multiply-adds: "
        f"at most {100 * products / (products + size):.0f} % of the peak if they share ports, as Intel's do"
    )


def heading(cell: Cell) -> str:
    """The part, the case and the processor."""
    part, heads = check_part(cell.contender), counted(cell.batch * cell.heads, "head")
    tile = f", Br = {cell.br}, Bc = {cell.bc}" if part.tiled else ""
    mask, threads = "causal" if cell.causal else "no mask", counted(cell.threads, "thread")
    mask += f", {cell.rules}" if cell.rules else ""
    what = f"{heads} of N = {cell.N}, d = {cell.d}{tile}, {mask}, {threads}"
    return f"{part.name}, {part.summary}: {what}\n{processor.name()}"


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
        f"{100 * rate / peak:.0f} % of the peak"
        + ("" if result.scratch is None else f"; scratch as allocated {size_text(result.scratch)}")
    )


def misses_text(cell: Cell, cachegrind: bool) -> str:
    """The cache misses of one head on one thread, counted by perf or simulated by cachegrind."""
    caches = processor.caches()
    first, last = caches[0], caches[:2][-1] if cachegrind else caches[-1]
    simd = "auto" if cell.simd == "ispc" else cell.simd or "auto"
    case, block = cell.case(heads=1, threads=1), block_of(cell.simd)
    simulated = (first, last) if cachegrind else None
    missed = counters.misses(cell.contender, case, simd, simulated, MISSES_SECONDS)
    if missed.l1 is None and missed.last is None:
        return f"misses      not counted: {missed.note}" + "; --cachegrind simulates them" * (not cachegrind)
    for_avx2 = cachegrind and counters.SIMULATED == "haswell"
    if for_avx2 and simd != "off":  # which has the tiles of 16 lanes on every processor
        block = counters.simulated_block(block)
    expected = streams(cell.contender, case, block)
    texts = [
        f"{size_text(moved)} into L{cache.level}"
        + (f", by the count {size_text(traffic(expected, cache.size))}" if expected else "")
        for cache, moved in ((first, missed.l1), (last, missed.last))
        if moved is not None
    ]
    how = "simulated by cachegrind" + " for AVX2" * for_avx2 if cachegrind else "counted by perf"
    return f"misses      of one head, {how}: {'; '.join(texts)}"


def traffic_table(flops: float, bounds: list[Level]) -> str:
    """A table of the bytes of each matrix that come into each cache."""
    rows = [("moved", [f"into L{b.cache.level} ({size_text(b.cache.size)})" for b in bounds])]
    for same in zip(*(b.streams for b in bounds)):
        sizes = [size_text(stream.traffic(b.cache.size)) for b, stream in zip(bounds, same)]
        rows.append((f"  {same[0].name}", sizes))
    rows.append(("  all", [size_text(b.traffic) for b in bounds]))
    rows.append(("FLOP / byte", [f"{flops / b.traffic:.3g}" for b in bounds]))
    return "\n".join(f"{title:12}" + "".join(f"{text:>20}" for text in texts) for title, texts in rows)


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
    bounds += [
        (f"filling L{b.cache.level}", f"{b.bandwidth / 1e9:.0f} GB/s", b.traffic / b.bandwidth)
        for b in levels
        if traffic(b.streams, math.inf) > b.cache.size
    ]
    return bounds


def arithmetic_text(case: Case, flops: float) -> str:
    """The operations of a call, perhaps of its gradients."""
    what = "scores and for output" if flops == case.flops else "five products"
    return f"arithmetic  {scaled(flops)}FLOP: 2 d for each query and key, for {what}"


def skipped_text(cell: Cell) -> str:
    """What a part skips by the rules of a cell, and what that saves."""
    part, seen, without = check_part(cell.contender), cell.seen, replace(cell, rules=None)
    saved = f"{scaled(without.flops)}FLOP without rules"
    if not part.operator:
        return f"skipped     nothing: all scores are computed, and some are hidden; {saved}"
    if not (cell.br and cell.bc):
        pairs = 100 - 100 * sum(map(len, seen)) / sum(map(len, without.seen))
        return f"skipped     {pairs:.3g} % of the pairs of a query and a key; {saved}"
    ruled, all_keys = (list(map(len, rules.together(each.seen, cell.br))) for each in (cell, without))
    tiles, all_tiles = (sum(-(-keys // cell.bc) for keys in each) for each in (ruled, all_keys))
    row = cell.batch * cell.heads * 2 * FLOAT_BYTES * cell.d
    return (
        f"skipped     {all_tiles - tiles} of {all_tiles} tiles of {cell.br} x {cell.bc}; {saved}\n"
        f"            {size_text(row * sum(ruled))} of K and V for the tiles that are read, "
        f"{size_text(row * sum(all_keys))} without rules\n"
        f"            {100 * sum(map(len, seen)) / computed(cell):.3g} % of the scores computed are seen"
    )


def computed(cell: Cell) -> int:
    """The scores of a head that part 4 computes: a strip's queries begin together, and end by vectors."""
    seen, block, count = cell.seen, block_of(cell.simd), 0
    assert cell.br
    for i in range(0, cell.N, cell.br):
        for r in range(i, min(i + cell.br, cell.N), block.panel):
            strip = seen[r : min(r + block.panel, i + cell.br)]
            rows = len(strip) if "documents" in str(cell.rules) else block.lanes
            begin, ends = min(keys.start for keys in strip), rules.together(strip, rows)
            count += sum(ends[n // rows].stop - begin for n in range(len(strip)))
    return count


def bound_text(limits: Sequence[Limit]) -> str:
    """The least time that each limit allows, and the limit with the longest time."""
    lines = [
        f"{'at least' if i == 0 else '':12}{1e3 * seconds:.3g} ms for {name} ({rate})"
        for i, (name, rate, seconds) in enumerate(limits)
    ]
    return "\n".join([*lines, f"bound by    {max(limits, key=lambda limit: limit[2])[0]}"])
