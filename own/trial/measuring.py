"""Measures a user's kernel: the judge's side, in a process that does not run the file.

python -m shakespeare.own.trial.measuring FILE SIZE

prints speed.Figures or a Finding as JSON, as SIZE is.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from shakespeare.attention_ext import attention, extension, processor
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab import backward, counters, machine, timing
from shakespeare.lab.bench.cases import plan
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.cuda import GpuBench
from shakespeare.lab.bench.measure import Bench
from shakespeare.own import kernel as kernels
from shakespeare.own.trial.clock import MIN_TIME, ROUNDS, Clock
from shakespeare.own.trial.diagnosis import Finding
from shakespeare.own.trial.gpu_clock import GpuClock
from shakespeare.own.trial.gradients import FLOPS
from shakespeare.own.trial.judge import Gone, Wrong, close_this_process
from shakespeare.own.trial.speed import LADDER, SECONDS, SMALLER, UNTIMED, WIDER, Figures, Size

PEAK_TRIES = 4  # measurements of the peak before a kernel is faster


def main(file: Path, size: Size) -> Figures | Finding:
    """Measure; this process does not run the file."""
    at = f"at N = {size.N}, d = {size.d}"
    close_this_process()
    try:
        return (_on_cpu if kernels.read(file).device == "cpu" else _on_gpu)(file, size)
    except Wrong as error:
        return error.finding
    except Gone as error:
        return Finding(error.finding.kind, f"{error.finding.sentence}, {at}")
    except RuntimeError as error:
        return Finding(UNTIMED, f"it was not timed: {str(error).splitlines()[0]}")


def cells(size: Size, device: str, **options: Any) -> list[Cell]:
    """Those of the ladder and SDPA at the timed size, or of one contender."""
    names = LADDER[device][-1:] if size.alone else (*LADDER[device], "sdpa")
    options |= {"heads": size.heads, "masks": [size.causal], "threads": [size.threads]}
    return plan(names, lengths=[size.N], widths=[size.d], device=device, **options)


def timed(bench: Any, round: Callable[[], None]) -> dict[str, float]:
    """The milliseconds of a bench's contenders, which take turns with a file's rounds."""
    turns = max(1, len(bench.cells))
    for turn, _ in enumerate(bench.run()):
        if turn % turns == 0:
            round()
    return {r.cell.contender: 1e3 * r.median for r in bench.done.results if r.median is not None}


def beside(size: Size, bench: Any, round: Callable[[], None]) -> dict[str, float]:
    """The milliseconds of a bench's contenders, or of backward passes, in turns with a file's rounds."""
    if size.alone:
        return {}
    return backward_timed(size, bench, round) if size.backward else timed(bench, round)


def backward_timed(size: Size, bench: Any, round: Callable[[], None]) -> dict[str, float]:
    """Those of backward passes: part 4's on the CPU, and PyTorch's."""
    shape = backward.Shape(1, size.heads, size.N, size.d, size.causal)
    on_cpu = isinstance(bench, Bench)
    *tensors, dout = (t if on_cpu else t.to(bench.gpu.device) for t in backward.normal(shape))
    sdpa = partial(scaled_dot_product_attention, is_causal=size.causal)
    calls = {"sdpa": backward.backward_of(sdpa, tensors, dout)}
    if on_cpu:
        calls["part4"] = backward.backward_of(partial(attention, "part4", causal=size.causal), tensors, dout)
    torch.set_num_threads(size.threads)

    def seconds(call: Callable[[], object]) -> Callable[[], float]:
        if on_cpu:
            return timing.repeated(call, MIN_TIME / ROUNDS)
        return lambda: statistics.median(bench.gpu.time(call, ROUNDS, cold=True))

    samples: dict[str, list[float]] = {name: [] for name in calls}
    runs = {name: seconds(call) for name, call in calls.items()}
    for _ in range(ROUNDS):
        round()
        for name, run in runs.items():
            samples[name].append(run())
    return {name: 1e3 * statistics.median(taken) for name, taken in samples.items()}


def _on_cpu(file: Path, size: Size) -> Figures | Finding:
    N, d, threads = size.N, size.d, size.threads
    alike = [] if size.alone or size.backward else [(max(1, N // SMALLER), d), (N, WIDER * d)]
    planned = cells(size, "cpu")
    cell, load = replace(planned[0], contender=str(file)), machine.Load()
    flops = cell.flops * (FLOPS if size.backward else 1)
    with Clock(file, size, alike) as clock:
        ms = beside(size, Bench(planned, ROUNDS, MIN_TIME), clock.round)
        clock.finish()
        seconds = [*map(clock.seconds, clock.sizes)]
        scratch = 4 * floats if (floats := clock.scratch()) is not None else None
        library = clock.library()
    peak = machine.fma_peak(threads=threads)
    limit = max(peak, machine.amx_peak(threads) / 3)  # float32 as three products of bfloat16
    read = cell.least_traffic * 3 / 4  # without the output
    for _ in range(PEAK_TRIES):  # of a machine that was busy
        reading = read / machine.read_bandwidth(int(read), threads)
        if flops <= limit * seconds[0] and reading <= seconds[0]:
            break
        peak = max(peak, machine.fma_peak(threads=threads))
        limit = max(limit, peak)
    else:
        if seconds[0] < clock.handing:
            what = f"a call takes less than handing it over does, {1e6 * clock.handing:.2g} us"
            return Finding(UNTIMED, f"it was not timed: {what}; a larger -N takes longer")
        return faster(flops / seconds[0], limit)
    small, wide = [1e3 * s if s else None for s in seconds[1:]] or (None, None)
    l2, ms = processor.caches()[:2][-1].size, ms | {"own": 1e3 * seconds[0]}
    figures = Figures(ms, flops, peak, l2, processor.name(), "cpu", small, wide, library=library)
    figures.latency, figures.lanes, figures.scratch = machine.fma_latency(), extension.size("lanes"), scratch
    figures.busy = machine.busy(load, [peak, machine.fma_peak(threads=threads)], threads)
    if size.cachegrind and file.suffix != ".py" and not size.backward:
        figures.moved = moved(cell)
    figures.least, figures.handing_ms = cell.least_traffic / size.heads, 1e3 * clock.handing
    return figures


def _on_gpu(file: Path, size: Size) -> Figures | Finding:
    planned = cells(size, "cuda", l2s=["cold"])
    cell = planned[0]
    bench = GpuBench(planned, ROUNDS, MIN_TIME)
    flops = cell.flops * (FLOPS if size.backward else 1)
    with GpuClock(file, size) as clock:
        ms = beside(size, bench, clock.round)
        clock.finish()
        seconds, library = clock.seconds(clock.sizes[0]), clock.library()
    peak = bench.gpu.fma_peak()
    limit = max(peak, bench.gpu.tensor_peak(Dtype.BF16) / 3)  # float32 as three products of bfloat16
    reading = cell.least_traffic * 3 / 4 / max(bench.gpu.bandwidths().values())
    if flops > limit * seconds or reading > seconds:
        return faster(flops / max(seconds, 1e-9), limit)
    ms, l2, name = ms | {"own": 1e3 * seconds}, processor.caches()[:2][-1].size, torch.cuda.get_device_name()
    figures = Figures(ms, flops, peak, l2, name, "cuda", busy=bench.done.busy, library=library)
    return replace(figures, handing_ms=1e3 * clock.handing)


def faster(rate: float, limit: float) -> Finding:
    """Why a speed is none."""
    what = f"{rate / 1e9:.3g} GFLOP/s, and its peak is {limit / 1e9:.3g}"
    return Finding("faster", f"not measured: faster than this processor can be ({what})")


def moved(cell: Any) -> dict[str, float] | None:
    """The bytes of one head into the first two caches, by cachegrind."""
    first, last = processor.caches()[0], processor.caches()[:2][-1]
    missed = counters.misses(cell.contender, cell.case(heads=1, threads=1), "auto", (first, last), SECONDS)
    if missed.l1 is None or missed.last is None:
        return None
    return {f"L{first.level}": missed.l1, f"L{last.level}": missed.last}


if __name__ == "__main__":
    print(json.dumps(asdict(main(Path(sys.argv[1]), Size(**json.loads(sys.argv[2]))))))
