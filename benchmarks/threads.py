"""The speed of writing text with 1, 2, 4 ... threads, and of a step of several texts, relative to the first.

    python -m benchmarks.threads [--threads 1,2,4] [--weights bf16] [--kv-cache bf16] [--texts 1,2,4,8]

The native engine, with part 4. All cases take turns, after their texts have been compared: they must be the
same. A figure is the median of the rounds. The memory limit of one text is the rate at which the
threads together read a token's bytes, each repeatedly its own share, measured in the same run.
"""

import itertools
import statistics
from functools import partial

import click
import torch

from benchmarks.measuring import (
    QUIET,
    attempt,
    percent,
    powers,
    quiet,
    show_table,
    spread,
    take_turns,
    write,
)
from shakespeare.app.cli import options
from shakespeare.attention_ext import extension, processor
from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.generation.engines.engine import Engine, open_engine
from shakespeare.generation.writer import Request
from shakespeare.lab.machine import fma_peak, read_bandwidth
from shakespeare.lab.timing import seconds_of
from shakespeare.model import load
from shakespeare.model.checkpoint import SHIPPED
from shakespeare.model.gpt import GPT

LEAST_SECONDS = 0.2  # of one measurement: a virtual machine's cores change places within seconds
WEIGHT_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.INT8: 1}  # without int8's scales
TITLES = (
    "texts | threads | tokens/s | times the first | a step, us | times the first | spread | FMA peak "
    f"| of memory limit | {QUIET}"
)


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
@options.numbers("--texts", "Numbers of texts at a time.", default="1")
@options.weights
@options.kv_cache
@options.whole("--rounds", "Rounds of each.", least=2, default=9)
def main(
    model: str, threads: tuple[int, ...], texts: tuple[int, ...], weights: str, kv_cache: str, rounds: int
) -> None:
    """Print tokens per second by the numbers of texts and threads."""
    gpt = load(model).model
    length = gpt.config.block_size - 1
    failed: dict[tuple[int, int], str] = {}
    engines: dict[tuple[int, int], Engine] = {}
    expected: list[list[int]] = []  # of the first of the most texts
    for count, team in itertools.product(sorted(texts, reverse=True), threads):
        engine = attempt(failed, (count, team), open_with, gpt, team, weights, kv_cache, count)
        written = engine and attempt(failed, (count, team), texts_of, engine, count)
        if engine and written:
            expected = expected or written
            if written != expected[:count]:
                raise click.ClickException(
                    f"{count} at a time, {team} threads: another text, so nothing is timed"
                )
            engines[count, team] = engine
    peaks = {team: [fma_peak(team)] for team in threads}
    order = [case for case in itertools.product(texts, threads) if case in engines]
    cases = {case: partial(mean_seconds, engines[case], case[0]) for case in order}
    seconds = take_turns(cases, rounds, failed)
    steps = {case: times.median / length for case, times in seconds.items()}
    first = next(iter(steps), (0, 0))
    for team in threads:
        peaks[team].append(fma_peak(team))

    def row(case: tuple[int, int]) -> str:
        count, team = case
        rate, times = count / steps[case], steps[case] / steps[first]
        share = rate / memory_limit(gpt, weights, kv_cache, team) if count == 1 else None
        return (
            f"{count} | {team} | {rate:.0f} | {rate * steps[first] / first[0]:.2f} | {1e6 * steps[case]:.1f} "
            f"| {times:.2f} | {percent(spread(seconds[case].counted))} "
            f"| {sum(peaks[team]) / sum(peaks[threads[0]]):.2f} | {percent(share) if share else ''} "
            f"| {quiet(seconds[case])}"
        )

    click.echo(
        f"{extension.describe('auto')}, PyTorch {torch.__version__}; {model}, weights in {weights}, "
        f"cache in {kv_cache}, {length} tokens a text\n"
    )
    show_table(TITLES, map(row, steps), failed)


if __name__ == "__main__":
    main()
