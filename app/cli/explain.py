"""explain: what one call of attention costs, and why."""

import click

from shakespeare.app.cli import options
from shakespeare.lab.cuda.architectures import SHEETS

DEFAULTS = {"batch": 1, "heads": 4, "N": 1024}
ON_CUDA = {"batch": 100, "heads": 1, "N": 4096}
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
@options.choice("--arch", ARCH, of=SHEETS, default=None)
@options.flag("--cachegrind", "Simulate the caches with valgrind; takes about fifty times as long.")
def explain(part, device, kernel, arch, cuda_queries, cachegrind, **sizes) -> None:
    """Show what PART costs and why: arithmetic, scratch, bytes into each cache, the bound, the time.

    The bytes are the algorithm's own count. The cache misses of one head are shown beside them if Linux's
    perf may count them, or with --cachegrind. With --device cuda a kernel of part4 is explained: registers,
    spills, occupancy, bytes through shared and global memory, the bound and the time. With --device webgpu
    part4's steps in WGSL are explained: their counts, the adapter's limits, the time that these allow, and
    the time.
    """
    if device != "cpu" and part != "part4":
        raise click.UsageError(f"PART is {part}; it must be part4 with --device {device}")
    options.check()
    from shakespeare.lab import rule_options
    from shakespeare.lab.bench.cases import plan
    from shakespeare.lab.bench.cell import Cell
    from shakespeare.lab.explain import explain as explained

    for name, size in (ON_CUDA if device == "cuda" else DEFAULTS).items():
        sizes[name] = sizes[name] or size
    given = {rule: sizes.pop(rule) for rule in options.RULES}
    if device == "cpu":
        lists = {"lengths": "N", "widths": "d", "masks": "causal", "simds": "simd"}
        lists.update((name, name) for name in ("br", "bc", "threads"))
        swept = {name: [sizes.pop(size)] for name, size in lists.items()}
        (cell,) = plan([part], **sizes, **swept, rules=[rule_options.text(given)])
    else:
        options.refuse(options.RULES, f"does not go with --device {device}")
        for name in ("simd", "br", "bc", "threads"):
            del sizes[name]
        queries = cuda_queries or sizes["N"]
        cell = Cell(part, None, queries=queries, br=None, bc=None, threads=1, device=device, **sizes)
    explained(cell, click.echo, cachegrind, kernel, arch)
