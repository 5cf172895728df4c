"""gpt.py explain part4 --device webgpu: what each step does by its own count, its bound and its time."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from shakespeare.attention_ext.parts import Dtype, check_compatible
from shakespeare.attention_ext.webgpu.steps import STEPS, WIDEST, Step, Tile, choose, up
from shakespeare.lab.bench.cases import Cell, check_memory
from shakespeare.lab.bench.measure import inputs
from shakespeare.lab.text import counted, markdown, scaled, size_text
from shakespeare.lab.webgpu.gpu import Gpu, prepared

TIMED = 5  # calls
FOUR = 16  # bytes of four float32 numbers
SUBGROUP = 32  # lanes of a GPU that read a number of workgroup memory at once, about; of a CPU it is one
TITLES = "step|tile|multiply-adds|exp2|workgroup memory|storage|predicted, ms|bound by|measured, ms"


@dataclass(frozen=True)
class Count:
    """Multiply-adds, powers of two, and bytes asked of each memory. A subgroup's common read counts once."""

    multiply_adds: int
    exponentials: int
    workgroup: int
    storage: int


def count(step: Step, tile: Tile, cell: Cell, subgroup: int) -> Count:
    """A step's own count, with the parts of tiles that are masked or past the end."""
    heads, Nq, Nk, d, causal = cell.batch * cell.heads, cell.queries, cell.N, cell.d, cell.causal
    element = Dtype(cell.dtype).bytes
    line, column = min(tile.lanes, subgroup), max(1, subgroup // tile.lanes)  # lanes that read one number
    d4, threads, rows = up(d, 4), tile.threads, up(Nq, tile.br)
    seen = [min(Nk, (i + 1) * tile.br + Nk - Nq) if causal else Nk for i in range(rows)]
    pairs = heads * sum(up(keys, tile.bc) for keys in seen)  # tiles of queries with tiles of keys
    width, scores = up(d4, tile.lanes), tile.br * tile.bc
    products = 4 * d4 * scores + 4 * width * tile.lanes * scores
    stored = heads * Nq * (d4 * 4 * element + 4)
    if step.name in "12":
        exponentials = threads * (tile.bc + 1)
        through = threads * 4 * (1 + 2 * tile.bc / line)  # S
        asked = threads * (2 * d4 + tile.bc * width)  # fours of Q, K and V
        if step.name == "1":
            storage = pairs * 4 * element * asked + stored
            return Count(pairs * products, pairs * exponentials, int(pairs * through), storage)
        read = threads * (d4 / line + (d4 + tile.bc * width) / column)
        through += FOUR * (2 * tile.bc * d4 + read)
    else:
        half = FOUR // 2 if step.name == "6" else FOUR  # of four numbers of K, V or P
        exponentials = scores + 4 * threads
        through = 2.0 * tile.bc * d4 * half  # K and V stored
        if step.name == "3":
            through += threads * d4 * (4 * FOUR / column + tile.rows * FOUR / line)  # S
            through += threads * tile.rows * FOUR * (1 + tile.lanes / line)  # P
        else:
            through += threads * d4 * 4 * (FOUR / line + tile.keys / 4 * half / column)  # S
            through += threads * half * (tile.keys + tile.bc / line)  # P
        through += threads * tile.bc * width * half / column  # V
        if step.name in "34" or subgroup < 2 * tile.lanes:
            through += threads * FOUR * (1 + tile.lanes / line)  # the maxima
    of_q = heads * rows * tile.br * d4
    storage = 4 * element * (of_q + pairs * 2 * tile.bc * d4) + stored
    return Count(pairs * products, pairs * exponentials, int(pairs * through) + FOUR * of_q, storage)


def explain(cell: Cell, echo: Callable[[str], None], kernel: str | None = None) -> None:
    """Print a row for each step, or `kernel`, and the limits. Raises ValueError, BuildError without one."""
    dtype, on = check_compatible("part4", "webgpu", cell.dtype), Gpu()
    if cell.d > WIDEST:
        raise ValueError(f"d is {cell.d}; it must be at most {WIDEST} on WebGPU")
    check_memory([cell])
    adapter, heads = on.gpu.adapter, cell.batch * cell.heads
    runnable = [name for name, step in STEPS.items() if not step.lacks(adapter)]
    steps = [choose(name, cell.d, dtype, adapter) for name in ([kernel] if kernel else runnable)]
    peak, exponentials, near, far = on.fma_peak(), on.exponentials, on.workgroup_bandwidth, on.bandwidth
    mask = "causal" if cell.causal else "no mask"
    echo(f"part4 on WebGPU: {counted(heads, 'head')} of N = {cell.N}, d = {cell.d}, {cell.dtype}, {mask}")
    echo(f"{adapter.name}, {adapter.backend}" + ": a CPU, which is right and never fast" * adapter.is_cpu)
    echo(
        f"limits, measured: {scaled(peak).strip()}FLOP/s, {scaled(exponentials).strip()} exp2/s, "
        f"workgroup memory {scaled(near).strip()}B/s, storage {scaled(far).strip()}B/s\n"
    )
    q, k, v = inputs(cell)
    rows = []
    for step, tile in steps:
        counts = count(step, tile, cell, 1 if adapter.is_cpu else SUBGROUP)
        bounds = {"multiply-adds": 2 * counts.multiply_adds / peak}
        bounds |= {"exp2": counts.exponentials / exponentials, "workgroup memory": counts.workgroup / near}
        bounds["storage"] = counts.storage / far
        bound = max(bounds, key=lambda name: bounds[name])
        call = prepared(q, k, v, cell.causal, step.name)
        on.time(call, 1)
        seconds = statistics.median(on.time(call, 1)[0] for _ in range(TIMED))
        operations = (scaled(count).strip() for count in (counts.multiply_adds, counts.exponentials))
        moved = size_text(counts.workgroup), size_text(counts.storage)
        times = f"{1e3 * bounds[bound]:.3g}", bound, f"{1e3 * seconds:.3g}"
        tile_text = f"{tile.br} x {tile.bc}, {tile.threads} threads"
        rows.append((step.name, tile_text, *operations, *moved, *times))
    echo(markdown(TITLES.split("|"), rows))
    for step, _ in steps:
        echo(f"\n{step.name}: {step.summary}. {step.why}")
