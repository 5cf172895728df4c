"""The speed of writing one text with drafts, relative to the same engine without them.

    python -m benchmarks.drafts [-m shakes2048] [--weights bf16] [--temperatures 0,0.8] [--corpus FILE]
        [--peer CTranslate2] [--device cuda]

The native engine with part 4 and one thread, or the cuda engine. Each round writes the text of another seed
and prompt, of a whole block, with and without drafts in turns. Both must be the same text. On a GPU the rows
of guesses add in another order, and the texts that differ are counted. Prompts: passages of the corpus's
last 10 %, prose and source code that Shakespeare would not have written, and random characters. 'times' is
the ratio of the medians of the quiet rounds, 'all' that of all rounds. A peer takes its turn in each round
with the same prompt, after a comparison of its logits with float64; it writes greedily, its fastest path.
"""

import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.generation import PEERS, exact_logits
from benchmarks.measuring import QUIET, attempt, percent, quiet, rows, show_table, take_turns, write
from benchmarks.peers import Peer
from shakespeare.app.cli import options
from shakespeare.attention_ext import extension
from shakespeare.attention_ext.parts import BuildError
from shakespeare.generation.engines import cuda
from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.model import corpus, load
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.tokenizer import CharTokenizer

PROMPT = 24  # characters
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


def settings(context: click.Context, option: click.Parameter, value: str) -> list[Sampling]:
    """The sampling of each temperature of --temperatures."""
    try:
        return [Sampling(float(temperature)) for temperature in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} must be numbers of at least 0, separated by commas") from None


class Contender:
    """An engine that writes the next text at each call."""

    def __init__(self, engine: Engine | Peer, texts: Iterator[list[int]], length: int, sampling: Sampling):
        self.engine, self.texts = engine, list[list[int]]()
        self._prompts, self._length = texts, length
        self._sampling = sampling

    def __call__(self) -> float:
        """The seconds of the text."""
        ids, seed = next(self._prompts), len(self.texts)
        length = self._length - len(ids)
        start = time.perf_counter()
        if isinstance(self.engine, Peer):
            self.texts += self.engine.greedy_batch([ids], length)
        else:
            self.texts += write(
                self.engine, [Request(ids, seed=seed, sampling=self._sampling, max_new_tokens=length)]
            )
        return time.perf_counter() - start


@click.command(context_settings={"show_default": True})
@options.model
@options.path("--corpus", "corpus_file", "Text of the prompts.", show_default="what prepare got")
@options.option(
    "--temperatures",
    "samplings",
    "Temperatures, separated by commas.",
    default="0,0.5,0.8,1,1.5",
    callback=settings,
)
@options.weights
@options.kv_cache
@options.draft
@options.choice("--device", "Where it is written.", of=("cpu", "cuda"), default="cpu")
@options.choice("--peer", "Another engine to compare with.", of=tuple(PEERS), default=None)
@options.whole("--rounds", "Rounds of each.", least=2, default=40)
def main(
    model: str,
    corpus_file: Path | None,
    samplings: list[Sampling],
    rounds: int,
    draft: str,
    device: str,
    peer: str | None,
    **precisions: Any,
):
    """Print how many times as fast one text is with drafts."""
    checkpoint, text = load(model), options.read_corpus(corpus_file)
    shown = ", ".join(f"{name} {value}" for name, value in precisions.items())
    if device == "cuda":
        try:
            writer = f"The cuda engine on {cuda.gpu().name}"
        except BuildError as missing:
            raise click.UsageError(str(missing)) from None
    else:
        writer = extension.describe("auto")
    click.echo(f"{writer}; {model}, {shown}, texts of {checkpoint.config.block_size} tokens\n")

    failed: dict[str, str] = {}

    def opened_peer() -> Peer | None:
        if peer is None:
            return None
        other = PEERS[peer](checkpoint.model, 1)
        ids = next(prompts("corpus", checkpoint, text))
        error = float((other.logits(ids) - exact_logits(checkpoint.model, ids)).abs().max())
        if not error <= other.most_error:
            raise click.ClickException(f"{other.name} is wrong: its logits differ by {error:.0e}")
        return other

    other = attempt(failed, peer, opened_peer)

    def row(kind: str, temperature: float) -> str:
        length, sampling = checkpoint.config.block_size, Sampling(temperature)

        def contender(engine: Engine | Peer) -> Contender:
            return Contender(engine, prompts(kind, checkpoint, text), length, sampling)

        def opened(guesses: str) -> Any:
            name = "cuda" if device == "cuda" else "native"
            threads = None if device == "cuda" else 1
            return open_engine(checkpoint, name, device=device, draft=guesses, threads=threads, **precisions)

        drafted = opened(draft)
        if drafted.draft is None:
            raise click.ClickException(f"{model} has no draft; gpt.py draft makes one")
        contenders = {"off": contender(opened("off")), "on": contender(drafted)}
        times = take_turns(contenders | ({"peer": contender(other)} if other else {}), rounds)
        texts = contenders["off"].texts, contenders["on"].texts
        if differ := sum(a != b for a, b in zip(*texts)):
            if device == "cpu":
                raise click.ClickException("drafts change a text")
            click.echo(f"{differ} of {len(texts[0])} texts differ", err=True)
        counts = drafted.draft_counts()
        without, with_ = times["off"], times["on"]
        tokens = length - PROMPT
        every = statistics.median(without.seconds) / statistics.median(with_.seconds)
        return (
            f"{kind} | {temperature:g} "
            f"| {tokens / without.median:,.0f} | {tokens / with_.median:,.0f} "
            f"| {without.median / with_.median:.2f} | {every:.2f} | {percent(counts.hits / counts.guesses)} "
            f"| {counts.tokens / counts.steps:.2f} | {quiet(with_)}"
            + (f" | {times['peer'].median / with_.median:.2f}" if other else "")
        )

    cases = ((kind, each.temperature) for kind in ("corpus", "unlike", "random") for each in samplings)
    show_table(TITLES + (f" | over {other.name}" if other else ""), rows(cases, row), failed)


if __name__ == "__main__":
    main()
