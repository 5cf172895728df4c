"""Measures a user's kernel: the judge's side, in a process that does not run the file.

python -m shakespeare.judge.speed_process FILE SIZE

prints speed.Figures or a Finding as JSON, as SIZE is.
"""

import json
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shakespeare.attention_ext import extension, processor, user_kernel
from shakespeare.attention_ext.checks import first_line
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge.clock import MIN_TIME, ROUNDS, Clock
from shakespeare.judge.diagnosis import Finding
from shakespeare.judge.gpu_clock import GpuClock
from shakespeare.judge.player import Gone, Wrong, close_this_process
from shakespeare.judge.speed import LADDER, LADDER_IN_16_BITS, SECONDS, SMALLER, UNTIMED, WIDER, Figures, Size
from shakespeare.lab import counters, machine
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.gpu_bench import GpuBench
from shakespeare.lab.bench.plan import known_on, plan
from shakespeare.lab.bench.runner import Bench
from shakespeare.lab.bench.sweep import Sweep

PEAK_TRIES = 4  # measurements of the limits before a kernel is faster
ABOVE_MATMUL = 1.25  # times a matrix product's speed that tensor cores may reach, by their data sheets


def main(file: Path, size: Size) -> Figures | Finding:
    """Measure; this process does not run the file."""
    at = f"at N = {size.N}, d = {size.d}"
    close_this_process()
    try:
        return measured(file, size)
    except Wrong as error:
        return error.finding
    except Gone as error:
        return Finding(error.finding.kind, f"{error.finding.sentence}, {at}")
    except RuntimeError as error:
        return Finding(UNTIMED, f"it was not timed: {first_line(error)}")


def ladder(size: Size, device: str) -> list[Cell]:
    """What is timed beside the file: the ladder, or the part with gradients, and SDPA."""
    known = known_on(device, size.backward)
    rungs = LADDER[device] if size.dtype == Dtype.FP32 else LADDER_IN_16_BITS
    names = [name for name in (*rungs, "sdpa") if name in known]
    sweep = Sweep(
        device=device,
        l2s=["cold"],
        lengths=[size.N],
        widths=[size.d],
        heads=size.heads,
        masks=[size.causal],
        threads=[size.threads],
        backward=size.backward,
        dtype=size.dtype,
    )
    return plan(names, sweep)


def timed(bench: Bench, clock: Clock) -> dict[str, float]:
    """The milliseconds of a bench's contenders, which take turns with a file's rounds."""
    for turn, _ in enumerate(bench.run()):
        if turn % len(bench.cells) == 0:
            clock.round()
    return {r.cell.contender: 1e3 * r.median for r in bench.done.results if r.median is not None}


def measured(file: Path, size: Size) -> Figures | Finding:
    """The figures of a right kernel. Raises Wrong, Gone, RuntimeError as Clock does."""
    threads = size.threads
    device = user_kernel.read(file).device
    on_cpu = device == "cpu"
    planned = ladder(size, device)
    bench = (Bench if on_cpu else GpuBench)(planned, ROUNDS, MIN_TIME)
    cell = replace(planned[0], contender=str(file))
    gpu: Any = bench.clock
    alike = [(max(1, size.N // SMALLER), size.d), (size.N, WIDER * size.d)]
    if size.alone or size.backward:
        alike.clear()
    with closing(Clock(file, size, alike) if on_cpu else GpuClock(file, size)) as clock:
        ms = {} if size.alone else timed(bench, clock)
        clock.finish()
        seconds, *others = clock.seconds()
        scratch = clock.scratch() if on_cpu else None
        library = clock.library()
    read = cell.least_traffic * (5 / 8 if size.backward else 3 / 4)  # without what is written
    peak = limit = 0.0
    for _ in range(PEAK_TRIES):  # a busy machine shows too low limits
        if on_cpu:
            peak = max(peak, machine.fma_peak(threads=threads))
            products = machine.amx_peak(threads)
            bandwidth = machine.read_bandwidth(int(read), threads)
        else:
            in_16_bits = size.dtype != Dtype.FP32
            products = gpu.tensor_peak(Dtype(size.dtype) if in_16_bits else Dtype.BF16)
            peak = max(peak, products if in_16_bits else gpu.fma_peak())
            products *= 3 * ABOVE_MATMUL if in_16_bits else 1
            bandwidth = max(gpu.bandwidths().values())
        limit = max(limit, peak, products / 3)  # float32 as three products of bfloat16
        if cell.flops <= limit * seconds and read <= bandwidth * seconds:
            break
    else:
        if on_cpu and seconds < clock.handing:
            what = f"a call takes less than handing it over does, {1e6 * clock.handing:.2g} us"
            return Finding(UNTIMED, f"it was not timed: {what}; a larger -N takes longer")
        return faster(cell.flops / max(seconds, 1e-9), limit)
    name = processor.name() if on_cpu else torch.cuda.get_device_name()
    small, wide = [1e3 * s if s else None for s in others] or (None, None)
    figures = Figures(
        ms | {"own": 1e3 * seconds},
        cell.flops,
        peak,
        processor.caches()[:2][-1].size,
        name,
        device,
        small,
        wide,
        library=library,
        handing_ms=1e3 * clock.handing,
        busy=bench.done.busy,
    )
    if on_cpu:
        figures.busy = machine.busy(clock.load, [peak, machine.fma_peak(threads=threads)], threads)
        figures.latency = machine.fma_latency()
        figures.lanes = extension.size("lanes")
        figures.scratch = scratch and 4 * scratch
        figures.least = cell.least_traffic / size.heads
        if size.cachegrind and file.suffix != ".py" and not size.backward:
            figures.moved = moved(cell)
    return figures


def faster(rate: float, limit: float) -> Finding:
    """Why a speed is none."""
    what = f"{rate / 1e9:.3g} GFLOP/s, and its peak is {limit / 1e9:.3g}"
    return Finding("faster", f"not measured: faster than this processor can be ({what})")


def moved(cell: Any) -> dict[str, float] | None:
    """The bytes of one head into the first two caches, by cachegrind."""
    first = processor.caches()[0]
    last = processor.caches()[:2][-1]
    missed = counters.misses(cell.contender, cell.case(heads=1, threads=1), "auto", (first, last), SECONDS)
    if missed.l1 is None or missed.last is None:
        return None
    return {f"L{first.level}": missed.l1, f"L{last.level}": missed.last}


if __name__ == "__main__":
    print(json.dumps(asdict(main(Path(sys.argv[1]), Size(**json.loads(sys.argv[2]))))))
