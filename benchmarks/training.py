"""A training step in C++ beside the same step in PyTorch.

    python benchmarks/training.py [--threads 1,2] [--batch 16] [--block-size 128] [--llm-c FOLDER]

shakes128's sizes, float32, no dropout. A step is gradients, clipping, Muon, AdamW and the average of the
weights. The gradients of one batch are compared first: each may differ by 1e-4 of its parameter's largest.
Both then take turns; a figure is the median of the rounds. The GFLOP/s exclude the optimizers' products; the
FMA peak is measured in the same run. FOLDER is a clone of llm.c. It gets the same weights and batch, which
its first loss must confirm; its step is gradients and AdamW. It runs before and after the rounds.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; a file there would hide a package of its name.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from attention_ext import processor  # noqa: E402

processor.let_waiting_threads_sleep()  # before torch is imported; spinning is slow on a busy machine

import torch  # noqa: E402

from app.cli.options import Numbers  # noqa: E402
from attention_ext import extension  # noqa: E402
from benchmarks.llm_c import LlmC  # noqa: E402
from lab import profile_training  # noqa: E402
from lab.machine import Load, busy_text, fma_peak  # noqa: E402
from lab.timing import in_turns  # noqa: E402
from model.loss import evaluate_windows  # noqa: E402
from training.trainer import Trainer  # noqa: E402

GELU = 2e-3  # nats between the losses of the exact GELU and of its approximation by tanh


class OfLlmC:
    """llm.c with the weights and a batch of a trainer, and the seconds of its steps."""

    def __init__(self, folder: Path, work: Path, trainer: Trainer, batch: int) -> None:
        T = trainer.recipe.block_size
        self.windows = trainer.ids[: batch * T + 1].unfold(0, T + 1, T)  # (batch, T + 1)
        self.program = LlmC(folder, work, trainer.model, self.windows)
        self.expected = evaluate_windows(trainer.model, self.windows)
        self.seconds: list[float] = []

    def run(self, threads: int) -> None:
        """Take its 41 steps. Raises ClickException if the first loss is not ours."""
        loss, seconds = self.program.steps(threads)
        if not abs(loss - self.expected) < GELU:
            raise click.ClickException(f"llm.c's loss is {loss:.4f}; ours is {self.expected:.4f}")
        self.seconds += seconds[1:]


def row(batch: int, block: int, threads: int, rounds: int, llm_c: Path | None) -> str:
    """A row of the table. Raises ClickException if a gradient differs."""
    config = dataclasses.replace(profile_training.SHAKES, block_size=block)
    both = [profile_training.trainer(part, config, batch) for part in ("part0", "part4")]
    name, error = profile_training.largest_error(*both)
    if not error <= profile_training.TOLERANCE:
        raise click.ClickException(f"the gradients of {name} differ by {error:.1e} of the largest")
    with tempfile.TemporaryDirectory() as work:
        other = None if llm_c is None else OfLlmC(llm_c, Path(work), both[0], batch)
        return timed(both, other, batch, threads, rounds, error)


def timed(
    both: list[Trainer], other: OfLlmC | None, batch: int, threads: int, rounds: int, error: float
) -> str:
    """The row of trainers whose gradients differ by `error`, and of llm.c, if it is there."""
    config, block = both[0].model.config, both[0].recipe.block_size
    if other:
        other.run(threads)
    times = in_turns([each.step for each in both], rounds)
    if other:
        other.run(threads)
    pytorchs, native = (statistics.median(seconds) for seconds in times)
    rate, peak = profile_training.operations(config, batch) / native, fma_peak(threads)
    figures = f"{1e3 * pytorchs:.1f} | {1e3 * native:.1f} | {pytorchs / native:.2f} | {error:.0e}"
    speed = f"{batch * block / native:,.0f} | {rate / 1e9:.0f} | {rate / peak:.0%}"
    third = ""
    if other:
        seconds_of_llm_c = statistics.median(other.seconds)
        third = f" {1e3 * seconds_of_llm_c:.0f} | {seconds_of_llm_c / native:.1f} |"
    return f"| {batch} x {block} | {threads} | {figures} | {speed} |{third}"


@click.command()
@click.option("--threads", type=Numbers(1024), default="1", show_default=True, help="Numbers of threads.")
@click.option("--batch", "batches", type=Numbers(4096), default="16", show_default=True, help="Batch sizes.")
@click.option("--block-size", "blocks", type=Numbers(2**14), default="128", show_default=True, help="Blocks.")
@click.option("-r", "--rounds", type=click.IntRange(1, 1000), default=15, show_default=True, help="Rounds.")
@click.option(
    "--llm-c", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A clone of llm.c."
)
def main(
    threads: tuple[int, ...],
    batches: tuple[int, ...],
    blocks: tuple[int, ...],
    rounds: int,
    llm_c: Path | None,
) -> None:
    """Time a training step in C++ and in PyTorch, after their gradients were compared."""
    click.echo(f"{processor.name()}; PyTorch {torch.__version__}; {extension.load().simd_name()}\n")
    click.echo(
        "| batch | threads | PyTorch, ms | native, ms | ratio | gradients differ by | characters/s | GFLOP/s "
        "| of the FMA peak |" + (" llm.c, ms | llm.c / native |" if llm_c else "")
    )
    click.echo("|---" * (11 if llm_c else 9) + "|")
    load = Load()
    for count in threads:
        torch.set_num_threads(count)
        for block in blocks:
            for batch in batches:
                click.echo(row(batch, block, count, rounds, llm_c))
    for line in busy_text(load.others(), max(threads)):
        click.echo(f"\n{line}")


if __name__ == "__main__":
    main()
