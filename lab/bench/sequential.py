"""Sequential C++, part1 on one core, beside a GPU's run: the baseline of the homework's chart.

A GPU's case would take minutes on one core. So fewer heads are timed, or one head at a shorter length, and
the time is scaled by the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attention_ext.parts import BuildError, Dtype
from lab.bench.cases import Cell
from lab.bench.measure import exact_output, inputs, verify
from lab.bench.results import Result
from lab.text import counted
from lab.timing import seconds_of

FLOPS = 6e9  # most operations of a call; part1 takes some two seconds
CALLS = 3


def smaller(cell: Cell) -> Cell:
    """The cell that is timed on the CPU in place of one on a GPU: float32, at most FLOPS operations."""
    heads = cell.batch * cell.heads
    small = replace(
        cell, contender="part1", simd="auto", batch=1, heads=1, dtype=Dtype.FP32.value, device="cpu", l2=None
    )
    while small.flops > FLOPS and small.N > 1:
        small = replace(small, N=small.N // 2, queries=max(1, small.queries // 2))
    if small.N < cell.N:
        return small
    return replace(small, heads=max(1, min(heads, int(FLOPS / small.flops))))


def seconds(cell: Cell, results: Sequence[Result]) -> float | None:
    """The time of sequential C++ for a cell, scaled by work; None if `results` lack it."""
    small = smaller(cell)
    for result in results:
        if result.cell == small and result.median is not None:
            return result.median * cell.flops / small.flops
    return None


def measure(cell: Cell) -> Result:
    """Verify and time smaller(cell) on one thread; it is skipped if it cannot be compiled."""
    small = smaller(cell)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, k, v = inputs(small)
        result, call = verify(small, q, k, v, exact_output(q, k, v, small.causal))
        if call:
            result.seconds, result.paces = [seconds_of(call) for _ in range(CALLS)], [1.0] * CALLS
    except BuildError as error:
        return Result(small, "skipped", str(error))
    finally:
        torch.set_num_threads(before)
    return result


def text(result: Result) -> str:
    """One line on the timed case; times for larger cells are scaled by work."""
    cell = result.cell
    case = f"N {cell.N}, d {cell.d}, {counted(cell.heads, 'head')}" + ", causal" * cell.causal
    if result.median is None:
        return f"sequential C++ ({case}): {result.status}: {result.note}"
    return f"sequential C++ (part1, one core of the CPU, {case}): {result.median:.3g} s; scaled by work"
