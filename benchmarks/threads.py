"""The speed of writing text with 1, 2, 4 ... threads, relative to one thread.

    python benchmarks/threads.py [--threads 1,2,4] [--weights bf16] [--kv-cache bf16] [--texts 512]

The native engine, with part 4. All numbers of threads take turns, after their texts have been compared: they
must be the same. A figure is the median of the rounds. The memory limit of one text is the rate at which the
threads together read a token's bytes, each repeatedly its own share, measured in the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; a file there would hide a package of its name.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from app.cli.options import Numbers  # noqa: E402
from attention_ext import extension, processor  # noqa: E402
from attention_ext.parts import CachePrecision, Precision  # noqa: E402
from generation.engine import Engine, open_engine  # noqa: E402
from generation.writer import Request, Writer  # noqa: E402
from lab.machine import fma_peak, read_bandwidth  # noqa: E402
from model import load  # noqa: E402
from model.checkpoint import SHIPPED  # noqa: E402
from model.gpt import GPT  # noqa: E402

LEAST_SECONDS = 0.2  # of one measurement: a virtual machine's cores change places within seconds
WEIGHTS = [each.value for each in Precision]
WEIGHT_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.INT8: 1}  # without int8's scales


def powers(most: int) -> str:
    """1,2,4 ... and `most`."""
    return ",".join(map(str, sorted({most, *(2**i for i in range(most.bit_length()))})))


def open_with(model: GPT, threads: int, weights: str, kv_cache: str, texts: int) -> Engine:
    """The engine for this many threads and texts."""
    torch.set_num_threads(threads)
    return open_engine(model, "native", weights=weights, kv_cache=kv_cache, slots=texts)


def write(engine: Engine, texts: int) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of `texts` texts of a whole block."""
    writer = Writer(engine, texts)
    start = time.perf_counter()
    made = {
        writer.join(Request([0], seed, max_new_tokens=engine.config.block_size - 1)): list[int]()
        for seed in range(texts)
    }
    while written := writer.step():
        for text, tokens in written:
            made[text] += tokens
    return time.perf_counter() - start, list(made.values())


def memory_limit(model: GPT, weights: str, kv_cache: str, threads: int) -> float:
    """Tokens per second of one text if only reading its bytes took time."""
    c = model.config
    matrices = (12 * c.n_layer * c.n_embd + c.vocab_size) * c.n_embd * WEIGHT_BYTES[Precision(weights)]
    keys_and_values = CachePrecision(kv_cache).bytes * 2 * c.n_layer * c.n_embd * c.block_size / 2
    needed = matrices + keys_and_values
    return read_bandwidth(int(needed / threads), threads) / needed


@click.command()
@click.option("-m", "--model", type=click.Choice(SHIPPED), default="shakes256", show_default=True)
@click.option(
    "--threads",
    type=Numbers(),
    default=powers(processor.cores()),
    help="Numbers of threads.  [default: to all cores]",
)
@click.option("--texts", type=click.IntRange(1), default=1, show_default=True, help="Texts at a time.")
@click.option(
    "--weights", type=click.Choice([each.value for each in Precision]), default="fp32", show_default=True
)
@click.option(
    "--kv-cache",
    type=click.Choice([each.value for each in CachePrecision]),
    default="fp32",
    show_default=True,
)
@click.option("--rounds", type=click.IntRange(2), default=9, show_default=True, help="Rounds of each.")
def main(model: str, threads: tuple[int, ...], texts: int, weights: str, kv_cache: str, rounds: int) -> None:
    """Print tokens per second by the number of threads."""
    gpt = load(model).model
    engines = {count: open_with(gpt, count, weights, kv_cache, texts) for count in threads}
    expected = write(engines[threads[0]], texts)[1]
    for count, engine in engines.items():
        if write(engine, texts)[1] != expected:
            raise click.ClickException(f"{count} threads write another text, so nothing is timed")
    seconds: dict[int, list[float]] = {count: [] for count in threads}
    peaks: dict[int, list[float]] = {count: [] for count in threads}
    for i in range(rounds):
        for count, engine in engines.items():
            write(engine, 1)  # wakes its threads
            times = [write(engine, texts)[0]]
            while sum(times) < LEAST_SECONDS:
                times.append(write(engine, texts)[0])
            seconds[count].append(statistics.mean(times))
            if i in (0, rounds - 1):
                peaks[count].append(fma_peak(count))
    tokens = texts * (gpt.config.block_size - 1)
    click.echo(
        f"{extension.describe('auto')}, PyTorch {torch.__version__}; {model}, weights in {weights}, "
        f"cache in {kv_cache}, "
        f"{texts} at a time, {gpt.config.block_size - 1} tokens each\n"
    )
    click.echo("| threads | tokens/s | spread | times the first | FMA peak | of memory limit |")
    click.echo("|---" * 6 + "|")
    first = statistics.median(seconds[threads[0]])
    for count in threads:
        median, (low, _, high) = statistics.median(seconds[count]), statistics.quantiles(seconds[count], n=4)
        share = (
            f"{100 * tokens / median / memory_limit(gpt, weights, kv_cache, count):.0f} %"
            if texts == 1
            else ""
        )
        click.echo(
            f"| {count} | {tokens / median:.0f} | {100 * (high - low) / median:.0f} % | {first / median:.2f} "
            f"| {statistics.mean(peaks[count]) / statistics.mean(peaks[threads[0]]):.2f} | {share} |"
        )


if __name__ == "__main__":
    main()
