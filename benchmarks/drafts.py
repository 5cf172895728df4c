"""The speed of writing one text with drafts, relative to the same engine without them.

    python -m benchmarks.drafts [-m shakes2048] [--weights bf16] [--temperatures 0,0.8] [--device cuda]

The native engine with one thread, or the cuda engine. Each round writes the text of another seed and prompt,
with and without drafts in turns. Both must be the same text; on a GPU the rows of guesses add in another
order, and the texts that differ are counted. Prompts: passages of the corpus's last 10 %, prose and source
code that Shakespeare would not have written, and random characters. 'times' is the ratio of the medians of
the quiet rounds, 'all' that of all rounds.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import click

from benchmarks.measuring import QUIET, percent, quiet, rows, show_table, write
from shakespeare.app.cli import options
from shakespeare.attention_ext import extension
from shakespeare.attention_ext.parts import BuildError
from shakespeare.generation.engines import cuda
from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.lab import timing
from shakespeare.model import corpus, load
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.tokenizer import CharTokenizer

PROMPT = 24  # characters
TEMPERATURES = "Temperatures, separated by commas."
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {"engine": "native", "threads": 1},
    "cuda": {"engine": "cuda", "device": "cuda"},
}
UNLIKE = (
    "The server returns an error when the request exceeds the limit of the buffer, and the client retries",
    "for i in range: total = total, x; if value is none: return; print the results, import data; class Model",
    "Yesterday the parliament voted about the budget for schools and hospitals; analysts expect a small rise",
)
TITLES = f"prompts | temperature | tokens/s without | with | times | all | hits | tokens a step | {QUIET}"


def prompts(kind: str, checkpoint: Checkpoint, text: str) -> Iterator[list[int]]:
    """Endless prompts of a kind."""
    rng, tokenizer = random.Random(0), checkpoint.tokenizer
    assert isinstance(tokenizer, CharTokenizer)  # other models have no draft
    held_out = corpus.split(text)[1]
    for number in range(10**9):
        if kind == "random":
            yield [rng.randrange(checkpoint.config.vocab_size) for _ in range(PROMPT)]
            continue
        source = held_out if kind == "corpus" else UNLIKE[number % len(UNLIKE)]
        at = rng.randrange(len(source) - PROMPT)
        known = "".join(c for c in source[at : at + PROMPT] if c in tokenizer.characters)
        yield tokenizer.encode(known or tokenizer.characters[0])


def temperatures_of(context: click.Context, option: click.Parameter, value: str) -> list[float]:
    """The numbers of --temperatures."""
    try:
        return [Sampling(float(temperature)).temperature for temperature in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} must be numbers of at least 0, separated by commas") from None


class Contender:
    """An engine that writes the text of the next prompt and seed at each call, of a whole block."""

    def __init__(self, engine: Engine, texts: Iterator[list[int]], sampling: Sampling) -> None:
        self.texts = list[list[int]]()
        self._engine, self._prompts, self._sampling = engine, texts, sampling

    def __call__(self) -> float:
        """The seconds of the text."""
        ids, seed = next(self._prompts), len(self.texts)
        length = self._engine.config.block_size - len(ids)
        request = Request(ids, seed=seed, sampling=self._sampling, max_new_tokens=length)
        start = time.perf_counter()
        self.texts += write(self._engine, [request])
        return time.perf_counter() - start


@click.command(context_settings={"show_default": True})
@options.model
@options.path("--corpus", "corpus_file", "Text of the prompts.", show_default="what prepare got")
@options.option("--temperatures", TEMPERATURES, default="0,0.5,0.8,1,1.5", callback=temperatures_of)
@options.weights
@options.kv_cache
@options.draft
@options.cpu_or_cuda
@options.whole("--rounds", "Rounds of each.", least=2, default=40)
def main(model, corpus_file, temperatures, rounds, draft, device, **precisions) -> None:
    """Print how many times as fast one text is with drafts."""
    checkpoint, text = load(model), options.read_corpus(corpus_file)
    shown = ", ".join(f"{name} {value}" for name, value in precisions.items())
    try:
        writer = f"The cuda engine on {cuda.gpu().name}" if device == "cuda" else extension.describe("auto")
    except BuildError as missing:
        raise click.UsageError(str(missing)) from None
    click.echo(f"{writer}; {model}, {shown}, texts of {checkpoint.config.block_size} tokens\n")

    def opened(guesses: str) -> Any:
        return open_engine(checkpoint, **ENGINES[device], draft=guesses, **precisions)

    def row(kind: str, temperature: float) -> str:
        drafted = opened(draft)
        if drafted.draft is None:
            raise click.ClickException(f"{model} has no draft; gpt.py draft makes one")
        engines, sampling = (opened("off"), drafted), Sampling(temperature)
        both = [Contender(engine, prompts(kind, checkpoint, text), sampling) for engine in engines]
        without, with_ = timing.take_turns(both, rounds)
        if differ := sum(a != b for a, b in zip(*(contender.texts for contender in both))):
            if device == "cpu":
                raise click.ClickException("drafts change a text")
            click.echo(f"{differ} of {rounds} texts differ", err=True)
        counts = drafted.draft_counts()
        tokens = checkpoint.config.block_size - PROMPT
        ratio_of_all = statistics.median(without.seconds) / statistics.median(with_.seconds)
        return (
            f"{kind} | {temperature:g} "
            f"| {tokens / without.median:,.0f} | {tokens / with_.median:,.0f} "
            f"| {without.median / with_.median:.2f} | {ratio_of_all:.2f} "
            f"| {percent(counts.hits / counts.guesses)} | {counts.tokens / counts.steps:.2f} | {quiet(with_)}"
        )

    show_table(TITLES, rows(itertools.product(("corpus", "unlike", "random"), temperatures), row))


if __name__ == "__main__":
    main()
