"""The lab's exercises: the test of a part, and one element of a 4-D tensor."""

from __future__ import annotations

import os
import sys

import click

from app.cli.options import (
    MOST_HEADS,
    WIDEST_HEAD,
    all_of,
    device_option,
    notice,
    one_thread_option,
    program,
    set_threads,
    size_option,
)
from attention_ext import processor
from attention_ext.parts import PARTS

METHODS = ("split", "gather", "ring", "zigzag", "ulysses")  # attention_ext.parallel.METHODS, which need torch
LAB_TILE = 256  # the lab's tile, in queries and in keys

shape_options = all_of(
    size_option("-B", "--batch", default=1, most=MOST_HEADS, help="Batch size of the test."),
    size_option("--heads", default=4, most=MOST_HEADS, help="Number of heads of the test."),
    size_option("-N", "N", default=1024, help="Sequence length of the test."),
    size_option("-d", "d", default=32, most=WIDEST_HEAD, help="Head width of the test."),
)
causal_option = click.option(
    "--causal", is_flag=True, help="Use a causal mask in the test; the model always uses one."
)


def run_test(part: str, **settings) -> None:
    """Run the lab's test of a part, with lab.correctness.run()'s settings; exit code 1 on a mismatch."""
    import signal

    from lab import correctness

    # Python's own handler of Ctrl-C would wait until a kernel returns.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        passed = correctness.run(part, **settings, echo=click.echo)
    finally:
        signal.signal(signal.SIGINT, before)
    if not passed:
        sys.exit(1)


backward_option = click.option(
    "--backward", is_flag=True, help="Test the gradients, against float64 and PyTorch; part0 and part4."
)


def run_backward_test(part: str, *, N: int, batch: int, heads: int, d: int, causal: bool, simd: str) -> None:
    """Run the lab's test of a part's gradients; exit code 1 on a mismatch."""
    from lab import backward

    shape = backward.Shape(batch, heads, N, d, causal)
    if not backward.run(part, shape, simd, echo=click.echo):
        sys.exit(1)


@click.command("4Daccess")
def four_d_access() -> None:
    """Read one element of a 4-D tensor through the extension's accessor."""
    from lab import correctness

    if not correctness.four_d_access(echo=click.echo):
        sys.exit(1)


@click.command()
@click.argument("method", type=click.Choice(METHODS), metavar="METHOD")
@size_option("-N", "N", default=4096, help="Keys of the sequence.")
@size_option("--queries", help="Queries, the last of the sequence.", show_default="N, in split 1")
@size_option("--heads", default=4, most=MOST_HEADS, help="Number of heads.")
@size_option("-d", "d", default=32, most=WIDEST_HEAD, help="Head width.")
@click.option("--causal", is_flag=True, help="Use a causal mask.")
@click.option(
    "--part", type=click.Choice(list(PARTS)), default="part4", show_default=True, help="What computes."
)
@device_option
@one_thread_option
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86400),
    default=30.0,
    show_default=True,
    help="Seconds to wait for another rank; must be more than a step takes.",
)
def parallel(method: str, threads: int, queries: int | None, **options) -> None:
    """Test attention over processes by METHOD: its result, bytes, steps, waiting and time.

    torchrun starts it once for each process:

    \b
    python -m torch.distributed.run --nproc-per-node 2 gpt.py parallel ring

    Each process is a rank and holds a part of the sequence. METHOD is split (keys over ranks, one merge, for
    decoding), gather (all keys to all ranks), ring (K and V go round), zigzag (a ring with equal causal work)
    or ulysses (heads over ranks). The exit code is 1 if a result is wrong, and 2 if a rank is lost. A lost
    rank is reported at most --timeout and five seconds after another rank began to wait for it.
    """
    if options["device"] == "cuda" and "cuda" not in PARTS[options["part"]].dtypes:
        raise click.UsageError(
            f"{options['part']} has no CUDA kernel; --device cuda goes with part0 and part4 only"
        )
    queries = queries or (1 if method == "split" else options["N"])
    if options["causal"] and queries > options["N"]:
        raise click.UsageError(f"--queries is {queries}; with --causal it must be at most N = {options['N']}")
    check_started(method)
    processor.let_waiting_threads_sleep()
    set_threads(threads)
    from attention_ext.ranks import LostRank
    from lab import parallel as over_processes

    try:
        passed = over_processes.run(
            over_processes.Question(method=method, queries=queries, **options), click.echo
        )
    except LostRank as error:
        if options["device"] == "cuda":  # a kernel that waits for the lost rank may block the usual exit
            notice(f"{program()}: error: {error}")
            os._exit(2)
        raise click.ClickException(str(error)) from error
    if not passed:
        sys.exit(1)


def check_started(method: str) -> None:
    """Raise UsageError, with the command, unless torchrun started this process."""
    module = "-m gpt" if program() == "shakespeare" else "gpt.py"
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise click.UsageError(
            "started without torchrun; the command is: "
            f"python -m torch.distributed.run --nproc-per-node 2 {module} parallel {method}"
        )
