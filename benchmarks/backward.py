"""The backward pass of part4 beside that of PyTorch's scaled_dot_product_attention.

    python -m benchmarks.backward [-N 256:2048*2] [--threads 1,2] [--mask causal,none]

float32, d = 32: (1, 4, N, 32), and last a batch of training, (16, 4, 128, 32). The gradients are compared
with float64 before they are timed: part4's error may be twice SDPA's. Both then take turns. A figure is the
median of the rounds; the FMA peak is measured in the same run.
"""

from collections.abc import Iterator
from functools import partial

import click
import torch

from benchmarks.measuring import QUIET, quiet, rows, show_table
from shakespeare.app.cli.options import MOST_THREADS, Names, Numbers
from shakespeare.attention_ext import extension, processor
from shakespeare.lab import backward
from shakespeare.lab.machine import fma_peak
from shakespeare.lab.timing import in_turns

TRAINING = (16, 4, 128, 32)
TITLES = "(B, H, N, d) | mask | threads | part4, ms | SDPA, ms | SDPA / part4 | GFLOP/s | of the FMA peak "
TITLES += f"| {QUIET}"


def row(shape: backward.Shape, threads: int, rounds: int, peak: float) -> str:
    """A row of the table. Raises ClickException if a gradient is wrong."""
    *tensors, dout = backward.normal(shape)
    both = backward.contenders("part4", shape, tensors, dout)
    for error in backward.errors(both, shape, tensors, dout):
        if not error.passed:
            raise click.ClickException(f"{shape}: the error of {error.name} is {error.part:.2e}")
    samples = in_turns(both, rounds, backward.LEAST_SECONDS)
    ours, sdpa = (of.median for of in samples)
    rate = shape.operations / ours
    mask = "causal" if shape.causal else "none"
    return (
        f"({shape.B}, {shape.H}, {shape.N}, {shape.d}) | {mask} | {threads} | {1e3 * ours:.2f} "
        f"| {1e3 * sdpa:.2f} | {sdpa / ours:.2f} | {rate / 1e9:.0f} | {rate / peak:.0%} | {quiet(samples[0])}"
    )


@click.command(context_settings={"show_default": True})
@click.option("-N", "lengths", type=Numbers(2**15), default="256:2048*2", help="Lengths.")
@click.option("--threads", type=Numbers(MOST_THREADS), default="1", help="Numbers of threads.")
@click.option("--mask", "masks", type=Names(("none", "causal")), default="causal", help="none, causal.")
@click.option("-r", "--rounds", type=click.IntRange(1, 1000), default=15, help="Rounds.")
def main(lengths: tuple[int, ...], threads: tuple[int, ...], masks: tuple[str, ...], rounds: int) -> None:
    """Time part4's backward pass and SDPA's, after both were compared with float64."""
    click.echo(f"{processor.name()}; PyTorch {torch.__version__}; {extension.load().simd_name()}\n")
    sizes = [(1, 4, N, 32) for N in lengths] + [TRAINING]
    shapes = [backward.Shape(*size, mask == "causal") for mask in masks for size in sizes]

    def every_row() -> Iterator[str]:
        for count in threads:
            torch.set_num_threads(count)
            peak = fma_peak(count)
            yield from rows(((shape, count) for shape in shapes), partial(row, rounds=rounds, peak=peak))

    show_table(TITLES, every_row())


if __name__ == "__main__":
    main()
