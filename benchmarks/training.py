"""A native training step beside the same step in PyTorch.

    python -m benchmarks.training [--threads 1,2] [--batch 16] [--block-size 128] [--device cuda]

shakes128's sizes, no dropout. A step is gradients, clipping, Muon, AdamW and the average of the weights. The
gradients of one batch are compared first: in float32, on a CPU, each may differ by 1e-4 of its parameter's
largest, in bfloat16, on a GPU, by 3e-2. Both then take turns; a figure is the median of the quiet rounds, on
a GPU of 100 steps each. The GFLOP/s exclude the optimizers' products; a CPU's FMA peak is measured too.
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
from shakespeare.attention_ext import BuildError, extension  # noqa: E402
from shakespeare.attention_ext.cuda.gpu import check_gpu  # noqa: E402
from shakespeare.lab import profile_training as training  # noqa: E402
from shakespeare.lab.machine import Load, busy_text, fma_peak  # noqa: E402
from shakespeare.lab.timing import in_turns  # noqa: E402
from shakespeare.training.trainer import Trainer  # noqa: E402

TITLES = "batch | threads | PyTorch, ms | native, ms | ratio | gradients differ by | characters/s | GFLOP/s "
TITLES += f"| of the FMA peak | {QUIET}"


ON_GPU = 100  # steps of a round
ROUNDED = 3e-2  # tolerance in bfloat16


def steps_of(trainer: Trainer) -> None:
    """The steps of a round."""
    for _ in range(ON_GPU if trainer.device.type == "cuda" else 1):
        trainer.step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()


def row(threads: int, block: int, batch: int, rounds: int, device: str) -> str:
    """A row of the table. Raises ClickException if a gradient differs."""
    torch.set_num_threads(threads)
    config, on_gpu = dataclasses.replace(training.SHAKES, block_size=block), device == "cuda"
    both = [training.trainer(part, config, batch, device=device) for part in ("part0", "part4")]
    name, error = training.largest_error(*both)
    if not error <= (ROUNDED if on_gpu else training.TOLERANCE):
        raise click.ClickException(f"the gradients of {name} differ by {error:.1e} of the largest")
    times = in_turns([partial(steps_of, trainer) for trainer in both], rounds)
    pytorchs, native = (samples.median / (ON_GPU if on_gpu else 1) for samples in times)
    rate = training.operations(config, batch) / native
    share = "-" if on_gpu else f"{rate / fma_peak(threads):.0%}"
    return (
        f"{batch} x {block} | {threads} | {1e3 * pytorchs:.2f} | {1e3 * native:.2f} "
        f"| {pytorchs / native:.2f} | {error:.0e} | {batch * block / native:,.0f} "
        f"| {rate / 1e9:.0f} | {share} | {quiet(times[1])}"
    )


@click.command(context_settings={"show_default": True})
@click.option("--threads", type=Numbers(MOST_THREADS), default="1", help="Numbers of threads.")
@click.option("--batch", "batches", type=Numbers(4096), default="16", help="Batch sizes.")
@click.option("--block-size", "blocks", type=Numbers(2**14), default="128", help="Blocks.")
@click.option("-r", "--rounds", type=click.IntRange(1, 1000), default=15, help="Rounds.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Device.")
def main(threads: tuple[int, ...], batches: tuple[int, ...], blocks: tuple[int, ...], rounds, device) -> None:
    """Time a native training step and PyTorch's, after their gradients were compared."""
    try:
        if device == "cuda":
            check_gpu()
    except BuildError as error:
        raise click.ClickException(str(error)) from None
    on = torch.cuda.get_device_name() if device == "cuda" else processor.name()
    click.echo(f"{on}; PyTorch {torch.__version__}; {extension.load().simd_name()}\n")
    load = Load()
    show_table(
        TITLES, rows(itertools.product(threads, blocks, batches), partial(row, rounds=rounds, device=device))
    )
    for line in busy_text(load.others(), max(threads)):
        click.echo(f"\n{line}")


if __name__ == "__main__":
    main()
