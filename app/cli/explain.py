"""explain: what one call of attention costs, and why."""

from dataclasses import dataclass, replace

import click

from shakespeare.app.cli import options
from shakespeare.lab.cuda.architectures import SHEETS

DEFAULTS = {"batch": 1, "heads": 4, "N": 1024}
ON_CUDA = {"batch": 100, "heads": 1, "N": 4096}


@dataclass(frozen=True)
class ExplainOptions(options.CallOptions):
    """The values of explain's options."""

    part: str
    cuda_queries: int | None
    threads: int
    arch: str | None
    cachegrind: bool


ARCH = "Explain the kernel for this architecture without measuring it; needs no GPU."


@click.command()
@options.part
@options.batch(show_default="1; 100 on CUDA")
@options.size("-N", "N", "Number of keys and of queries.", show_default="1024; 4096 on CUDA")
@options.size("--queries", "cuda_queries", "Number of queries, on CUDA.", show_default="as many as keys")
@options.width
@options.tiles(default="auto")
@options.causal
@options.rules
@options.heads(show_default="4; 1 on CUDA")
@options.one_thread
@options.simd
@options.dtype
@options.device
@options.with_backward
@options.choice("--arch", ARCH, choices=SHEETS, default=None)
@options.flag("--cachegrind", "Simulate the caches with valgrind; takes about fifty times as long.")
@options.gathered("chosen", ExplainOptions)
def explain(chosen: ExplainOptions) -> None:
    """Show what PART costs and why: arithmetic, scratch, bytes into each cache, the bound, the time.

    The bytes are the algorithm's own count. The cache misses of one head are shown beside them if Linux's
    perf may count them, or with --cachegrind. With --device cuda a kernel of part4 is explained: registers,
    spills, occupancy, bytes through shared and global memory, the bound and the time. With --device webgpu
    part4's steps in WGSL are explained: their counts, the adapter's limits, the time that these allow, and
    the time.
    """
    device = chosen.device
    part = chosen.part
    if device != "cpu" and part != "part4":
        raise click.UsageError(f"PART is {part}; it must be part4 with --device {device}")
    options.check()
    from shakespeare.lab.bench.cell import Cell
    from shakespeare.lab.bench.plan import plan
    from shakespeare.lab.bench.sweep import Sweep
    from shakespeare.lab.explain import explain as explained

    usual = ON_CUDA if device == "cuda" else DEFAULTS
    batch, heads, N = (getattr(chosen, name) or size for name, size in usual.items())
    chosen = replace(chosen, batch=batch, heads=heads, N=N)
    if device == "cpu":
        lists = {
            "lengths": [chosen.N],
            "widths": [chosen.d],
            "masks": [chosen.causal],
            "simds": [chosen.simd],
            "rules": [chosen.rules],
            **{name: [getattr(chosen, name)] for name in ("br", "bc", "threads")},
        }
        (cell,) = plan([part], options.made(Sweep, chosen, **lists))
    else:
        options.refuse(options.RULES, f"does not go with --device {device}")
        unused = dict.fromkeys(("simd", "br", "bc", "rules"))
        queries = chosen.cuda_queries or chosen.N
        cell = options.made(Cell, chosen, contender=part, queries=queries, threads=1, **unused)
    explained(cell, click.echo, chosen.cachegrind, chosen.kernel, chosen.arch)
