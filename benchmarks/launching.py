"""The host's time for a call of attention on CUDA: part 4 and PyTorch's SDPA.

    python -m benchmarks.launching [--dtype fp32,bf16] [--rounds 25]

The host launches calls without waiting for the GPU, fewer than the driver queues; so kernels that take
longer than their launch do not count. The contenders take turns, after their results have been compared. A
figure is the median of the rounds.
"""

from collections.abc import Callable
from functools import partial

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import percent, rows, show_table, spread, take_turns
from shakespeare.app.cli import options
from shakespeare.attention_ext import BuildError, attention, processor
from shakespeare.attention_ext.parts import Dtype
from shakespeare.lab.cuda.gpu import Gpu
from shakespeare.lab.timing import seconds_of

CALLS = 300  # the driver queues 1,024 launches
SHAPES = ((1, 4, 64, 32), (1, 4, 256, 32), (2, 8, 64, 64))
TOLERANCES = {Dtype.FP32: 1e-4, Dtype.BF16: 2e-2, Dtype.FP16: 2e-3}
TITLES = "dtype | (B, H, N, d) | part4, us | spread | SDPA, us | spread"


def host_seconds(call: Callable[[], object]) -> float:
    """Seconds in which the host launches a call."""
    torch.cuda.synchronize()

    def launched() -> None:
        for _ in range(CALLS):
            call()

    return seconds_of(launched) / CALLS


def row(dtype: Dtype, shape: tuple[int, ...], rounds: int) -> str:
    """The times of a case, after a check of the results."""
    q, k, v = (torch.randn(*shape, device="cuda").to(getattr(torch, dtype.torch_name)) for _ in range(3))
    calls: list[Callable[[], Tensor]] = [
        partial(attention, "part4", q, k, v),
        partial(F.scaled_dot_product_attention, q, k, v),
    ]
    ours, theirs = (call() for call in calls)
    if not torch.allclose(ours, theirs, TOLERANCES[dtype], TOLERANCES[dtype]):
        raise click.ClickException(f"{dtype}, {shape}: the results differ")
    for call in calls:
        host_seconds(call)
    seconds = take_turns({i: partial(host_seconds, call) for i, call in enumerate(calls)}, rounds)
    times = (f"{1e6 * each.median:.1f} | {percent(spread(each.counted))}" for each in seconds.values())
    return f"{dtype} | {shape} | {' | '.join(times)}"


@click.command(context_settings={"show_default": True})
@options.names("--dtype", "Formats of the inputs.", of=list(Dtype), default="fp32,bf16")
@options.whole("--rounds", "Rounds of each.", least=2, default=25)
def main(dtype: tuple[str, ...], rounds: int) -> None:
    """Print microseconds of the host for a call."""
    try:
        on = Gpu().describe()["name"]
    except BuildError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{on}; host {processor.name()}; PyTorch {torch.__version__}\n")
    with torch.inference_mode():
        cases = ((Dtype(each), shape) for each in dtype for shape in SHAPES)
        show_table(TITLES, rows(cases, partial(row, rounds=rounds)))


if __name__ == "__main__":
    main()
