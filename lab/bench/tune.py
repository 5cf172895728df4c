"""gpt.py bench --tune: part 4's best tile for this processor, by successive halving.

All tiles are timed a few times, the slower half is dropped, the rest are timed more often, and so on. Most of
the time goes to tiles of similar speed (Jamieson & Talwalkar 2016, arXiv:1502.07943).
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.default_tile import DEFAULT, Tuned
from shakespeare.attention_ext.parts import resolve_simd
from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.runner import inputs
from shakespeare.lab.formats import markdown
from shakespeare.lab.timing import Clock

SIDES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
MIN_GAIN = 0.01  # share of the time that a tile must save to replace the default one
MIN_SECONDS = 2e-3  # least time of one measurement; a clock tick is negligible beside it


def candidates(N: int, br: Sequence[int] = (), bc: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The tiles to try at N queries and keys: those given, else SIDES up to N; the default comes first."""
    sides = [side for side in SIDES if side < N] + [N]
    tried = itertools.product(br or sides, bc or [side for side in sides if side >= min(N, 32)])
    default = min(DEFAULT[0], N), min(DEFAULT[1], N)
    return list(dict.fromkeys([default, *tried]))


def tune(cell: Cell, budget: float, tried: Sequence[tuple[int, int]] | None = None) -> Iterator[Tuned]:
    """Yield the best tile for a cell of a tiled part so far, each time that the slower half is dropped.

    budget: seconds in all. tried: tiles (br, bc), the default one first; by default candidates().
    """
    simd = resolve_simd(cell.simd or "auto")
    remaining = list(tried or candidates(cell.N))
    default = remaining[0]
    seconds: dict[tuple[int, int], list[float]] = {tile: [] for tile in remaining}
    q, k, v = inputs(cell)

    def once(tile: tuple[int, int], repeats: int) -> None:
        options: dict = dict(causal=cell.causal, br=tile[0], bc=tile[1], simd=simd)
        call = partial(attention, cell.contender, q, k, v, **options)
        seconds[tile].append(statistics.fmean(Clock().time(call, repeats)))

    before = torch.get_num_threads()
    torch.set_num_threads(cell.threads)
    try:
        once(default, 1)  # compiles, and wakes the threads
        once(default, 1)
        repeats = max(1, math.ceil(MIN_SECONDS / seconds.pop(default)[-1]))
        seconds[default] = []
        end = time.perf_counter() + budget
        halvings = max(1, math.ceil(math.log2(len(remaining))))
        for halving in range(halvings):
            share = time.perf_counter() + (end - time.perf_counter()) / (halvings - halving)
            while not seconds[default] or time.perf_counter() < share:
                for tile in remaining:
                    if not seconds[default] or time.perf_counter() < share:
                        once(tile, repeats)
            timed = [tile for tile in remaining if seconds[tile]]
            remaining = sorted(timed, key=lambda tile: statistics.median(seconds[tile]))
            remaining = remaining[: max(1, math.ceil(len(remaining) / 2))]
            best = remaining[0]
            standard = statistics.median(seconds[default])
            fastest = statistics.median(seconds[best])
            if fastest > (1 - MIN_GAIN) * standard:
                best = default
                fastest = standard
            remaining = list(dict.fromkeys([*remaining, default]))  # the default is timed to the end
            yield Tuned(simd, cell.threads, cell.d, cell.N, cell.causal, *best, fastest, standard)
    finally:
        torch.set_num_threads(before)


def text(tiles: Sequence[Tuned]) -> str:
    """The tiles as a Markdown table."""
    default = f"{DEFAULT[0]} x {DEFAULT[1]}, ms"
    titles = ("SIMD", "threads", "d", "N", "mask", "Br", "Bc", "ms", default, "gain")
    rows = [
        (t.simd, t.threads, t.d, t.N, "causal" if t.causal else "none", t.br, t.bc)
        + (f"{1e3 * t.seconds:.4g}", f"{1e3 * t.default_seconds:.4g}")
        + (f"{100 * (t.default_seconds / t.seconds - 1):.1f} %",)
        for t in tiles
    ]
    return markdown(titles, rows)
