"""A training step in C++ beside the same step in PyTorch.

    python -m benchmarks.training [--threads 1,2] [--batch 16] [--block-size 128]

shakes128's sizes, float32, no dropout. A step is gradients, clipping, Muon, AdamW and the average of the
weights. The gradients of one batch are compared first: each may differ by 1e-4 of its parameter's largest.
Both then take turns; a figure is the median of the quiet rounds. The GFLOP/s exclude the optimizers'
products; the FMA peak is measured in the same run.
"""

import dataclasses
import itertools
from functools import partial

import click

from shakespeare.attention_ext import processor

processor.let_waiting_threads_sleep()  # before torch is imported; spinning is slow on a busy machine

import torch  # noqa: E402

from benchmarks.measuring import QUIET, quiet, rows, show_table  # noqa: E402
from shakespeare.app.cli.options import MOST_THREADS, Numbers  # noqa: E402
from shakespeare.attention_ext import extension  # noqa: E402
from shakespeare.lab import profile_training as training  # noqa: E402
from shakespeare.lab.machine import Load, busy_text, fma_peak  # noqa: E402
from shakespeare.lab.timing import in_turns  # noqa: E402

TITLES = "batch | threads | PyTorch, ms | native, ms | ratio | gradients differ by | characters/s | GFLOP/s "
TITLES += f"| of the FMA peak | {QUIET}"


def row(threads: int, block: int, batch: int, rounds: int) -> str:
    """A row of the table. Raises ClickException if a gradient differs."""
    torch.set_num_threads(threads)
    config = dataclasses.replace(training.SHAKES, block_size=block)
    both = [training.trainer(part, config, batch) for part in ("part0", "part4")]
    name, error = training.largest_error(*both)
    if not error <= training.TOLERANCE:
        raise click.ClickException(f"the gradients of {name} differ by {error:.1e} of the largest")
    times = in_turns([trainer.step for trainer in both], rounds)
    pytorchs, native = (samples.median for samples in times)
    rate, peak = training.operations(config, batch) / native, fma_peak(threads)
    return (
        f"{batch} x {block} | {threads} | {1e3 * pytorchs:.1f} | {1e3 * native:.1f} "
        f"| {pytorchs / native:.2f} | {error:.0e} | {batch * block / native:,.0f} "
        f"| {rate / 1e9:.0f} | {rate / peak:.0%} | {quiet(times[1])}"
    )


@click.command(context_settings={"show_default": True})
@click.option("--threads", type=Numbers(MOST_THREADS), default="1", help="Numbers of threads.")
@click.option("--batch", "batches", type=Numbers(4096), default="16", help="Batch sizes.")
@click.option("--block-size", "blocks", type=Numbers(2**14), default="128", help="Blocks.")
@click.option("-r", "--rounds", type=click.IntRange(1, 1000), default=15, help="Rounds.")
def main(threads: tuple[int, ...], batches: tuple[int, ...], blocks: tuple[int, ...], rounds: int) -> None:
    """Time a training step in C++ and in PyTorch, after their gradients were compared."""
    click.echo(f"{processor.name()}; PyTorch {torch.__version__}; {extension.load().simd_name()}\n")
    load = Load()
    show_table(TITLES, rows(itertools.product(threads, blocks, batches), partial(row, rounds=rounds)))
    for line in busy_text(load.others(), max(threads)):
        click.echo(f"\n{line}")


if __name__ == "__main__":
    main()
