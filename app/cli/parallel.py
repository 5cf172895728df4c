"""parallel: attention over processes, which torchrun starts."""

import os

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice, program
from shakespeare.attention_ext import PARTS

TIMEOUT = "Seconds to wait for another rank; must be more than a turn takes."
METHODS = ("split", "gather", "ring", "zigzag", "ulysses")  # attention_ext.parallel.METHODS, which need torch


@click.command()
@click.argument("method", type=click.Choice(METHODS), metavar="METHOD")
@options.size("-N", "N", "Keys of the sequence.", default=4096)
@options.size("--queries", "Queries, the last of the sequence.", show_default="N, in split 1")
@options.heads(default=4)
@options.width
@options.causal
@options.choice("--part", "What computes.", choices=PARTS, default="part4")
@options.cpu_or_cuda
@options.one_thread
@options.number("--timeout", TIMEOUT, minimum=1, maximum=86400, default=30.0)
def parallel(
    method: str,
    N: int,
    queries: int | None,
    heads: int,
    d: int,
    causal: bool,
    part: str,
    device: str,
    threads: int,
    timeout: float,
) -> bool:
    """Test attention over processes by METHOD: its result, bytes, exchanges, waiting and time.

    torchrun starts it once for each process:

    \b
    python -m torch.distributed.run --nproc-per-node 2 gpt.py parallel ring

    Each process is a rank and holds a part of the sequence. METHOD is split (keys over ranks, one merge, for
    decoding), gather (all keys to all ranks), ring (K and V go round), zigzag (a ring with equal causal work)
    or ulysses (heads over ranks). The exit code is 1 if a result is wrong, and 2 if a rank is lost. A lost
    rank is reported at most --timeout and five seconds after another rank began to wait for it.
    """
    options.check()
    queries = queries or (1 if method == "split" else N)
    if causal and queries > N:
        raise click.UsageError(f"--queries is {queries}; with --causal it must be at most N = {N}")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        module = "-m shakespeare" if program() == "shakespeare" else "gpt.py"
        command = f"python -m torch.distributed.run --nproc-per-node 2 {module} parallel {method}"
        raise click.UsageError(f"started without torchrun; the command is: {command}")
    options.set_threads(threads)
    from shakespeare.attention_ext.ranks import LostRank
    from shakespeare.lab import parallel as over_processes

    setup = over_processes.Setup(method, N, queries, heads, d, causal, part, device, timeout)
    try:
        return over_processes.run(setup, click.echo)
    except LostRank as error:
        if device == "cuda":  # a kernel that waits for the lost rank may block the usual exit
            notice(f"{program()}: error: {error}")
            os._exit(2)
        raise click.ClickException(str(error)) from error
