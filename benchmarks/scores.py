"""Does the time of attention depend on the size of the scores?

    python -m benchmarks.scores [--parts part2,part4] [--simd portable,off] [-N 1024] [-d 32]

q and k are scaled by s, so the scores grow with s^2. Weights far below the maximum of their row then become
denormal numbers unless a kernel makes them 0. A multiply-add with a denormal number takes over a hundred
cycles on many processors. In the last column q and k are denormal themselves.

Each s is timed in turn with s = 1 on one thread, after its result has been compared with float64. A figure is
the median ratio of the rounds: a shared machine is slower for seconds at a time. The exit code is 1 if one of
our kernels exceeds --limit in any column.
"""

import statistics
import sys
from functools import partial

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import rows, show_table
from shakespeare.app.cli.options import Names
from shakespeare.attention_ext import PARTS, SIMD, attention, extension, processor, reference
from shakespeare.lab.timing import Samples, in_turns

SCALES = (1, 1.5, 2, 3, 4, 5, 6, 8)
DENORMAL = 1e-40
MOST_ERROR = 1e-3  # of the largest expected value; scores of s = 8 have a rounding error of about 1e-4
CALL_SECONDS = 2e-3  # a measurement repeats shorter calls
TITLES = f"contender | SIMD | ms at s = 1 | {' | '.join(f's = {s:g}' for s in SCALES[1:])} | denormal"


def call(part: str, simd: str | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call of a part, or of PyTorch's SDPA."""
    return F.scaled_dot_product_attention(q, k, v) if simd is None else attention(part, q, k, v, simd=simd)


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The largest difference from float64, as a share of the largest expected value."""
    exact, _ = reference.flash_attention(q.double(), k.double(), v.double(), br=512, bc=512)
    return float((out - exact).abs().max() / exact.abs().max())


def ratios(
    part: str, simd: str | None, cases: list[tuple[Tensor, Tensor, Tensor]], rounds: int
) -> tuple[float, list[float]]:
    """(seconds of the first case, the other cases' times relative to it). Raises ClickException."""
    for case in cases:
        off = error(call(part, simd, *case), *case)
        if not off <= MOST_ERROR:
            raise click.ClickException(f"{part} errs by {off:.1e}, so it is not timed")
    calls, firsts, found = [partial(call, part, simd, *case) for case in cases], [], []
    for other in calls[1:]:
        both = in_turns([calls[0], other], rounds, CALL_SECONDS)
        firsts += both[0].counted
        pairs = [min(paces) for paces in zip(*(samples.paces for samples in both))]
        ratios = [seconds / first for first, seconds in zip(*(samples.seconds for samples in both))]
        found.append(Samples(ratios, pairs).median)
    return statistics.median(firsts), found


@click.command(context_settings={"show_default": True})
@click.option("--parts", type=Names(PARTS), default=",".join(PARTS), help="Parts to time.")
@click.option("--simd", "simds", type=Names(SIMD), default="portable", help="SIMD helpers to time.")
@click.option("-N", "N", type=click.IntRange(1), default=1024, help="Queries and keys.")
@click.option("-d", "d", type=click.IntRange(1), default=32, help="Head width.")
@click.option("--rounds", type=click.IntRange(3), default=9, help="Rounds.")
@click.option("--limit", type=click.FloatRange(1), default=1.2, help="Largest ratio.")
def main(parts: tuple[str, ...], simds: tuple[str, ...], N: int, d: int, rounds: int, limit: float) -> None:
    """Print each contender's time by the scale of q and k, relative to s = 1."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, N, d, generator=generator) for _ in range(3))
    cases = [(s * q, s * k, v) for s in (*SCALES, DENORMAL)]
    slow = False

    def row(part: str, simd: str) -> str:
        nonlocal slow
        first, others = ratios(part, None if part == "sdpa" else simd or "auto", cases, rounds)
        slow = slow or bool(simd) and max(others) > limit
        return f"{part} | {simd} | {1e3 * first:.3g} | {' | '.join(f'{ratio:.2f}' for ratio in others)}"

    click.echo(f"{processor.name()}, PyTorch {torch.__version__}, {extension.describe()}; N = {N}, d = {d}\n")
    compiled = [part for part in parts if PARTS[part].operator]
    each = ((part, simd) for part in (*parts, "sdpa") for simd in (simds if part in compiled else ("",)))
    show_table(TITLES, rows(each, row))
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
