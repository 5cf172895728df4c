"""The backward pass of part4 beside that of PyTorch's scaled_dot_product_attention.

    python benchmarks/backward.py [-N 256:2048*2] [--threads 1,2] [--mask causal,none]

float32, d = 32: (1, 4, N, 32), and last a batch of training, (16, 4, 128, 32). The gradients are compared
with float64 before they are timed: part4's error may be twice SDPA's. Both then take turns. A figure is the
median of the rounds; the FMA peak is measured in the same run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; a file there would hide a package of its name.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from app.cli.options import Names, Numbers  # noqa: E402
from attention_ext import extension, processor  # noqa: E402
from lab import backward  # noqa: E402
from lab.machine import fma_peak  # noqa: E402

TRAINING = (16, 4, 128, 32)


def row(shape: backward.Shape, threads: int, rounds: int, peak: float) -> str:
    """A row of the table. Raises ClickException if a gradient is wrong."""
    *tensors, dout = backward.normal(shape)
    both = backward.contenders("part4", shape, tensors, dout)
    for error in backward.errors(both, shape, tensors, dout):
        if not error.passed:
            raise click.ClickException(f"{shape}: the error of {error.name} is {error.part:.2e}")
    ours, sdpa = backward.seconds(both, rounds)
    mask = "causal" if shape.causal else "none"
    rate = shape.operations / ours
    name = f"({shape.B}, {shape.H}, {shape.N}, {shape.d})"
    figures = (
        f"{1e3 * ours:.2f} | {1e3 * sdpa:.2f} | {sdpa / ours:.2f} | {rate / 1e9:.0f} | {rate / peak:.0%}"
    )
    return f"| {name} | {mask} | {threads} | {figures} |"


@click.command()
@click.option("-N", "lengths", type=Numbers(2**15), default="256:2048*2", show_default=True, help="Lengths.")
@click.option("--threads", type=Numbers(1024), default="1", show_default=True, help="Numbers of threads.")
@click.option("--mask", "masks", type=Names(), default="causal", show_default=True, help="none, causal.")
@click.option("-r", "--rounds", type=click.IntRange(1, 1000), default=15, show_default=True, help="Rounds.")
def main(lengths: tuple[int, ...], threads: tuple[int, ...], masks: tuple[str, ...], rounds: int) -> None:
    """Time part4's backward pass and SDPA's, after both were compared with float64."""
    if set(masks) - {"none", "causal"}:
        raise click.UsageError(f"--mask is {','.join(masks)}; it must have none or causal")
    click.echo(f"{processor.name()}; PyTorch {torch.__version__}; {extension.load().simd_name()}\n")
    click.echo(
        "| (B, H, N, d) | mask | threads | part4, ms | SDPA, ms | SDPA / part4 | GFLOP/s | of the FMA peak |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    for count in threads:
        torch.set_num_threads(count)
        peak = fma_peak(count)
        for mask in masks:
            for B, H, N, d in [(1, 4, N, 32) for N in lengths] + [TRAINING]:
                click.echo(row(backward.Shape(B, H, N, d, mask == "causal"), count, rounds, peak))


if __name__ == "__main__":
    main()
