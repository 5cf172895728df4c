"""How fast a user's kernel is, beside the parts and PyTorch, and what to do next.

python -m shakespeare.own.trial.speed FILE N d heads causal threads cachegrind alone

measures in this process, which the kernel may crash, and prints Figures as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shakespeare.lab.command import run
from shakespeare.lab.text import size_text
from shakespeare.own import kernel as own
from shakespeare.own.trial.checking import SIGNALS, environment

SECONDS = 600  # that the measurement may take
ROUNDS, MIN_TIME = 6, 0.06
LADDER = {"cpu": ("part1", "part2", "part3", "part4"), "cuda": ("kernel1", "kernel2", "kernel3", "kernel4")}
SMALLER = 16  # N is so many times smaller in the call that fits the first caches
WIDER = 2  # d is so many times larger in the call that tells the softmax's time from the products'
MUCH = 0.4  # share of the time that a softmax should not take
GROWN = 1.35  # by this much a score costs more at N than at N / SMALLER where the caches are the bound
LINE_BYTES_PER_FLOP = 4  # bytes into a cache for an operation: 32 if each number comes with a line of 64
NEAR = 0.7  # share of the peak that leaves little
# The passages that hints refer to.
PAGES = {
    "lanes": "docs/learn/attention.md#part-2-blocks",
    "blocks": "docs/learn/attention.md#part-2-blocks",
    "rows": "docs/learn/attention.md#part-3-one-row-at-a-time",
    "tiles": "docs/learn/attention.md#part-4-tiles-and-an-online-softmax",
    "helpers": "docs/use/measuring.md#effect-of-the-simd-helpers",
    "kernel1": "docs/learn/gpu.md#kernel-1-a-launch-for-each-tile-of-keys",
    "kernel2": "docs/learn/gpu.md#kernel-2-one-launch-padding-4-x-4-scores-a-thread",
    "kernel3": "docs/learn/gpu.md#kernel-3-where-a-rows-state-is",
    "kernel4": "docs/learn/gpu.md#kernel-4-float32-near-the-limit",
    "kernel5": "docs/learn/gpu.md#kernel-5-tensor-cores",
}


@dataclass(frozen=True)
class Size:
    """The call that is timed: heads matrices of N rows and d columns."""

    N: int = 1024
    d: int = 32
    heads: int = 4
    causal: bool = False
    threads: int = 1


@dataclass
class Figures:
    """What was measured.

    ms: the medians of a call, of the file ('own'), of the ladder's parts and of sdpa. small_ms: that of the
    file at N / SMALLER; wide_ms: at WIDER * d. flops: of a call. peak: multiply-adds' on the threads.
    latency: seconds of a multiply-add that waits for the one before. lanes: of a vector. scratch, l2: bytes.
    moved: bytes of one head into each of two caches, if they were simulated; least: the fewest possible.
    """

    ms: dict[str, float]
    small_ms: float | None
    wide_ms: float | None
    flops: float
    peak: float
    latency: float
    lanes: int
    scratch: int | None
    l2: int
    cpu: str
    device: str
    busy: str | None = None
    moved: dict[str, float] | None = None
    least: float = 0.0

    @property
    def share(self) -> float:
        """Of the peak."""
        return self.flops / (1e-3 * self.ms["own"]) / self.peak

    @property
    def softmax(self) -> float:
        """Share of the time that does not grow with d: the softmax's, and 0 where it is not known."""
        if self.wide_ms is None:
            return 0.0
        mine = self.ms["own"]
        return min(1.0, max(0.0, (WIDER - self.wide_ms / mine) / (WIDER - 1)))


def measure(
    file: Path,
    size: Size,
    cachegrind: bool = False,
    stop: Callable[[], bool] | None = None,
    *,
    alone: bool = False,
) -> Figures | str:
    """The figures of a right kernel, or why there are none. Raises Stopped if stop().

    alone: only the file's call, for its share of the peak.
    """
    words = (size.N, size.d, size.heads, int(size.causal), size.threads, int(cachegrind), int(alone))
    command = [sys.executable, "-m", "shakespeare.own.trial.speed", str(file.resolve()), *map(str, words)]
    try:
        code, out, err = run(command, SECONDS, stop, **environment())
    except subprocess.TimeoutExpired:
        return f"it was not timed: a call takes too long at N = {size.N}"
    if code < 0:
        import signal

        name = signal.Signals(-code).name
        return f"it crashed at N = {size.N}, d = {size.d}: {SIGNALS.get(name, name)}"
    if code:
        return f"it was not timed: {(err.splitlines() or ['no reason given'])[-1]}"
    return Figures(**json.loads(out.splitlines()[-1]))


def main(words: Sequence[str]) -> None:
    """Measure, and print Figures."""
    import torch

    from shakespeare.attention_ext import extension, processor
    from shakespeare.lab import machine
    from shakespeare.lab.bench.cases import Cell, plan
    from shakespeare.lab.bench.cuda import GpuBench
    from shakespeare.lab.bench.measure import Bench

    file, (N, d, heads, causal, threads, cachegrind, alone) = words[0], map(int, words[1:])
    device = own.device(Path(file))
    sizes: dict[str, Any] = dict(widths=[d], heads=heads, masks=[bool(causal)], threads=[threads])
    sizes |= {"device": device} | ({"l2s": ["warm"]} if device == "cuda" else {})
    others = [] if alone else [*LADDER[device], "sdpa"]
    cells: list[Cell] = plan([file, *others], lengths=[N], **sizes)
    small: list[Cell] = []
    if device == "cpu" and not alone:
        small = plan([file], lengths=[max(1, N // SMALLER)], **sizes)
        small += plan([file], lengths=[N], **sizes | {"widths": [WIDER * d]})
    bench: Bench | GpuBench
    if device == "cuda":
        bench = GpuBench([*cells, *small], ROUNDS, MIN_TIME)
    else:
        bench = Bench([*cells, *small], ROUNDS, MIN_TIME)
    for _ in bench.run():
        pass
    results = {(r.cell.contender, r.cell.N, r.cell.d): r for r in bench.done.results}
    mine = results[file, N, d]
    if mine.median is None:
        raise SystemExit(f"{mine.status}, {mine.note}")
    ms = {
        "own" if name == file else name: 1e3 * r.median
        for (name, *at), r in results.items()
        if at == [N, d] and r.median is not None
    }
    beside = [
        results[at].median if at in results else None
        for at in ((file, N // SMALLER, d), (file, N, WIDER * d))
    ]
    shrunk, wide = (1e3 * seconds if seconds else None for seconds in beside)
    kernel = own.loaded(Path(file))
    scratch = mine.scratch
    if isinstance(kernel, own.Native):
        scratch = 4 * kernel.scratch(1, heads, N, N, d, bool(causal), threads)
    cell = mine.cell
    found = Figures(
        ms,
        shrunk,
        wide,
        cell.flops,
        bench.done.peak(cell),
        machine.fma_latency() if device == "cpu" else 0.0,
        extension.size("lanes") if device == "cpu" else 1,
        scratch,
        processor.caches()[:2][-1].size,
        processor.name() if device == "cpu" else torch.cuda.get_device_name(),
        device,
        bench.done.busy,
        least=cell.least_traffic / heads,
    )
    if cachegrind and isinstance(kernel, own.Native):
        found.moved = moved(cell)
    print(json.dumps(asdict(found)))


def moved(cell: Any) -> dict[str, float] | None:
    """The bytes of one head into the first two caches, by cachegrind."""
    from shakespeare.attention_ext import processor
    from shakespeare.lab import counters

    caches = processor.caches()
    pair = caches[0], caches[:2][-1]
    missed = counters.misses(cell.contender, cell.case(heads=1, threads=1), "auto", pair, SECONDS)
    if missed.l1 is None or missed.last is None:
        return None
    return {f"L{pair[0].level}": missed.l1, f"L{pair[1].level}": missed.last}


def place(figures: Figures) -> str:
    """Where it stands on the ladder: 'between part2 and part3'; the slowest part first."""
    mine = figures.ms["own"]
    names = sorted((n for n in LADDER[figures.device] if n in figures.ms), key=lambda n: -figures.ms[n])
    slower = [name for name in names if figures.ms[name] > mine]
    faster = [name for name in names if figures.ms[name] <= mine]
    if not slower:
        return f"slower than {faster[0]}"
    if not faster:
        return f"faster than {slower[-1]}"
    return f"between {slower[-1]} and {faster[0]}"


def hint(figures: Figures, size: Size, text: str) -> tuple[str, str]:
    """What bounds it, and what to do next; and one of PAGES. text: the kernel's source."""
    if figures.device == "cuda":
        return _hint_on_gpu(figures)
    products = 1e-3 * figures.ms["own"] * max(0.01, 1 - figures.softmax)  # seconds
    rate, threads = figures.flops / products, size.threads
    lane = figures.peak / figures.lanes
    matrix = 4 * size.N * size.N
    grown = figures.ms["own"] / figures.small_ms / SMALLER**2 if figures.small_ms else 1.0
    lines = figures.moved and max(figures.moved.values()) > LINE_BYTES_PER_FLOP * figures.flops / size.heads
    if figures.share >= NEAR:
        return f"{100 * figures.share:.0f} % of the peak: little is left. Part 4 shows what", "tiles"
    if lines:
        return (
            "a cache line comes in for each number: V is read down its columns, with stride d. Let the inner "
            "loop run along a row of V: O[c] += P[j] * V[j][c]",
            "lanes",
        )
    helped = re.search(r"softmax_row|exp_sum|online_softmax", text)
    if figures.softmax > MUCH and figures.share < 0.5 and not helped:
        return (
            f"{100 * figures.softmax:.0f} % of the time does not grow with d: it is the softmax's. "
            "softmax_row() of cpu/softmax.h takes the exponentials of a whole vector at a time",
            "helpers",
        )
    if rate < 1.5 * lane:
        each = 2 * threads / figures.latency
        chain = "one addition waits for the one before it" if rate < 4 * each else "one number at a time"
        return (
            f"{chain} in the products: {rate / 1e9:.3g} GFLOP/s, and one lane of {figures.lanes} gives "
            f"{lane / 1e9:.3g}. Let the inner loop run over neighbours with a sum each: O[c] += P[j] * "
            "V[j][c] reads V along its rows, and S[j] += Q[c] * Kt[c][j] takes a transposed tile of K",
            "lanes",
        )
    if grown > GROWN:
        return (
            f"a score costs {grown:.1f} times as much as at N = {size.N // SMALLER}: the matrices leave the "
            "cache. Let a tile of queries share each pass over K and V (simd::multiply of simd/simd.h)",
            "blocks",
        )
    if figures.scratch is not None and figures.scratch >= matrix and rate > figures.peak / 4:
        return f"S takes {size_text(matrix)}, written and read again: keep a row or a tile of it", "rows"
    if figures.scratch is not None and 4 * figures.scratch > figures.l2 * threads and rate > figures.peak / 3:
        return (
            f"the scratch, {size_text(figures.scratch)}, leaves the first caches: take a tile of keys at a "
            "time too, and correct the sums when the maximum rises",
            "tiles",
        )
    if threads > 1 and "thread" not in text and "for_each_item" not in text:
        return (
            f"one of {threads} threads works: rows of a head are independent (for_each_item of threads.h)",
            "rows",
        )
    if "simd::multiply" in text:
        return (
            "the products use the helpers, and wait for the cache: rows a multiple of 4 KiB apart share "
            "a few of its sets. Let a tile of K^T or of S lie by itself, its rows one after the other",
            "blocks",
        )
    return (
        "the vectors wait: keep a block of sums in registers, four rows by a few vectors, as simd::multiply",
        "blocks",
    )


def _hint_on_gpu(figures: Figures) -> tuple[str, str]:
    """The next kernel of the ladder."""
    mine, steps = (
        figures.ms["own"],
        {
            "kernel2": "one launch for all keys, and several scores a thread, which read shared memory less",
            "kernel3": "the row's state in registers, and keys that a whole warp reads at once",
            "kernel4": "8 x 8 scores a thread, vector loads, and copies that run beside the arithmetic",
        },
    )
    for name, what in steps.items():
        if figures.ms.get(name, 0) < 0.9 * mine:
            return f"{name} takes {figures.ms[name]:.3g} ms: {what}", name
    return "as fast as float32 gets on these units: tensor cores are next", "kernel5"


if __name__ == "__main__":
    main(sys.argv[1:])
