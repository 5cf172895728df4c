"""The speed of writing text with 1, 2, 4 ... threads, relative to one thread.

    python -m benchmarks.threads [--threads 1,2,4] [--weights bf16] [--kv-cache bf16] [--texts 512]

The native engine, with part 4. All numbers of threads take turns, after their texts have been compared: they
must be the same. A figure is the median of the rounds. The memory limit of one text is the rate at which the
threads together read a token's bytes, each repeatedly its own share, measured in the same run.
"""

import statistics
from functools import partial

import click
import torch

from app.cli import options
from attention_ext import extension, processor
from attention_ext.parts import CachePrecision, Precision
from benchmarks.measuring import QUIET, percent, powers, quiet, show_table, spread, take_turns, write
from generation.engine import Engine, open_engine
from generation.writer import Request
from lab.machine import fma_peak, read_bandwidth
from lab.timing import seconds_of
from model import load
from model.checkpoint import SHIPPED
from model.gpt import GPT

LEAST_SECONDS = 0.2  # of one measurement: a virtual machine's cores change places within seconds
WEIGHT_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.INT8: 1}  # without int8's scales
TITLES = f"threads | tokens/s | spread | times the first | FMA peak | of memory limit | {QUIET}"


def open_with(model: GPT, threads: int, weights: str, kv_cache: str, texts: int) -> Engine:
    """The engine for this many threads and texts."""
    torch.set_num_threads(threads)
    return open_engine(model, "native", weights=weights, kv_cache=kv_cache, slots=texts, draft="off")


def texts_of(engine: Engine, count: int) -> list[list[int]]:
    """The tokens of `count` texts of a whole block."""
    length = engine.config.block_size - 1
    return write(engine, [Request([0], seed, max_new_tokens=length) for seed in range(count)])


def mean_seconds(engine: Engine, texts: int) -> float:
    """Seconds in which the texts are written."""
    texts_of(engine, 1)  # wakes its threads
    times: list[float] = []
    while sum(times) < LEAST_SECONDS:
        times.append(seconds_of(lambda: texts_of(engine, texts)))
    return statistics.mean(times)


def memory_limit(model: GPT, weights: str, kv_cache: str, threads: int) -> float:
    """Tokens per second of one text if only reading its bytes took time."""
    c = model.config
    matrices = (12 * c.n_layer * c.n_embd + c.vocab_size) * c.n_embd * WEIGHT_BYTES[Precision(weights)]
    keys_and_values = CachePrecision(kv_cache).bytes * 2 * c.n_layer * c.n_embd * c.block_size / 2
    needed = matrices + keys_and_values
    return read_bandwidth(int(needed / threads), threads) / needed


@click.command(context_settings={"show_default": True})
@click.option("-m", "--model", type=click.Choice(SHIPPED), default="shakes256")
@options.numbers("--threads", "Numbers of threads.", default=powers(processor.cores()))
@options.whole("--texts", "Texts at a time.", default=1)
@options.weights
@options.kv_cache
@options.whole("--rounds", "Rounds of each.", least=2, default=9)
def main(model: str, threads: tuple[int, ...], texts: int, weights: str, kv_cache: str, rounds: int) -> None:
    """Print tokens per second by the number of threads."""
    gpt = load(model).model
    engines = {count: open_with(gpt, count, weights, kv_cache, texts) for count in threads}
    expected = texts_of(engines[threads[0]], texts)
    for count, engine in engines.items():
        if texts_of(engine, texts) != expected:
            raise click.ClickException(f"{count} threads write another text, so nothing is timed")
    peaks = {count: [fma_peak(count)] for count in threads}
    seconds = take_turns(
        {count: partial(mean_seconds, engine, texts) for count, engine in engines.items()}, rounds
    )
    tokens = texts * (gpt.config.block_size - 1)
    rates = {count: tokens / times.median for count, times in seconds.items()}
    for count in threads:
        peaks[count].append(fma_peak(count))

    def row(count: int) -> str:
        share = rates[count] / memory_limit(gpt, weights, kv_cache, count) if texts == 1 else None
        return (
            f"{count} | {rates[count]:.0f} | {percent(spread(seconds[count].counted))} "
            f"| {rates[count] / rates[threads[0]]:.2f} | {sum(peaks[count]) / sum(peaks[threads[0]]):.2f} "
            f"| {percent(share) if share else ''} | {quiet(seconds[count])}"
        )

    click.echo(
        f"{extension.describe('auto')}, PyTorch {torch.__version__}; {model}, weights in {weights}, "
        f"cache in {kv_cache}, {texts} at a time, {gpt.config.block_size - 1} tokens each\n"
    )
    show_table(TITLES, map(row, threads))


if __name__ == "__main__":
    main()
