"""The lab's exercises: the test of a part, and one element of a 4-D tensor."""

from __future__ import annotations

import sys

import click

from app.cli.options import MOST_HEADS, WIDEST_HEAD, all_of, size_option

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


@click.command("4Daccess")
def four_d_access() -> None:
    """Read one element of a 4-D tensor through the extension's own accessor."""
    from lab import correctness

    if not correctness.four_d_access(echo=click.echo):
        sys.exit(1)
