"""Does the time of attention depend on the size of the scores?

    python benchmarks/scores.py [--parts part2,part4] [--simd portable,off] [-N 1024] [-d 32]

q and k are scaled by s, so the scores grow with s^2. Weights far below the maximum of their row then become
denormal numbers unless a kernel makes them 0. A multiply-add with a denormal number takes over a hundred
cycles on many processors. In the last column q and k are denormal themselves.

Each s is timed in turn with s = 1 on one thread, after its result has been compared with float64. A figure is
the median ratio of the rounds: a shared machine is slower for seconds at a time. The exit code is 1 if one of
our kernels exceeds --limit in any column.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attention_ext import PARTS, SIMD, attention, extension, processor, reference  # noqa: E402

SCALES = (1, 1.5, 2, 3, 4, 5, 6, 8)
DENORMAL = 1e-40
MOST_ERROR = 1e-3  # of the largest expected value; scores of s = 8 have a rounding error of about 1e-4
CALL_SECONDS = 2e-3  # a measurement repeats shorter calls


def inputs(N: int, d: int) -> list[Tensor]:
    """q, k and v, each (1, 4, N, d)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4, N, d, generator=generator) for _ in range(3)]


def call(part: str, simd: str | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call of a part, or of PyTorch's SDPA."""
    return F.scaled_dot_product_attention(q, k, v) if simd is None else attention(part, q, k, v, simd=simd)


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The largest difference from float64, as a share of the largest expected value."""
    exact, _ = reference.flash_attention(q.double(), k.double(), v.double(), br=512, bc=512)
    return float((out - exact).abs().max() / exact.abs().max())


@click.command()
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Parts to time.")
@click.option("--simd", "simds", default="portable", show_default=True, help="SIMD helpers to time.")
@click.option("-N", "N", type=click.IntRange(1), default=1024, show_default=True, help="Queries and keys.")
@click.option("-d", "d", type=click.IntRange(1), default=32, show_default=True, help="Head width.")
@click.option("--rounds", type=click.IntRange(3), default=9, show_default=True, help="Rounds.")
@click.option("--limit", type=click.FloatRange(1), default=1.2, show_default=True, help="Largest ratio.")
def main(parts: str, simds: str, N: int, d: int, rounds: int, limit: float) -> None:
    """Print each contender's time by the scale of q and k, relative to s = 1."""
    for argument, names, known in (("parts", parts, PARTS), ("simd", simds, SIMD)):
        for name in names.split(","):
            if name not in known:
                raise click.UsageError(f"{argument} has {name!r}; it must hold names of {', '.join(known)}")
    torch.set_num_threads(1)
    q, k, v = inputs(N, d)
    cases = [(s * q, s * k, v) for s in SCALES] + [(DENORMAL * q, DENORMAL * k, v)]
    contenders: list[tuple[str, str | None]] = [
        (part, simd)
        for part in parts.split(",")
        for simd in (simds.split(",") if PARTS[part].operator else ["auto"])
    ]
    contenders.append(("sdpa", None))
    click.echo(f"{processor.name()}, PyTorch {torch.__version__}, {extension.describe()}; N = {N}, d = {d}\n")
    click.echo(
        f"| contender | SIMD | ms at s = 1 | {' | '.join(f's = {s:g}' for s in SCALES[1:])} | denormal |"
    )
    click.echo("|---" * (4 + len(SCALES[1:])) + "|")
    slow = False
    for part, simd in contenders:
        for case in cases:
            off = error(call(part, simd, *case), *case)
            if not off <= MOST_ERROR:
                raise click.ClickException(f"{part} errs by {off:.1e}, so it is not timed")
        start = time.perf_counter()
        call(part, simd, *cases[0])
        repeats = max(1, round(CALL_SECONDS / (time.perf_counter() - start)))

        def seconds(case: tuple[Tensor, Tensor, Tensor]) -> float:
            start = time.perf_counter()
            for _ in range(repeats):
                call(part, simd, *case)
            return (time.perf_counter() - start) / repeats

        firsts, ratios = [], []
        for case in cases[1:]:
            pairs = [(seconds(cases[0]), seconds(case)) for _ in range(rounds)]
            firsts += [first for first, _ in pairs]
            ratios.append(statistics.median(other / first for first, other in pairs))
        first = statistics.median(firsts)
        ours = PARTS[part].operator is not None if part in PARTS else False
        slow = slow or (ours and max(ratios) > limit)
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        click.echo(f"| {part} | {simd if ours else ''} | {1e3 * first:.3g} | {shown} |")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
