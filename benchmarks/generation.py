"""Generating text against other engines on the same weights: verified, interleaved, medians.

    python benchmarks/generation.py [--cases batch1,long] [--threads 1] [--peers CTranslate2]
        [--corpus FILE] [--save [FILE]]

Before a contender is timed, its logits are compared with float64, and its greedy text with that of our
PyTorch engine. Equally likely tokens may be chosen differently, so a different text is only reported. Times
are of whole texts, with the prompt and each engine's Python loop. With one thread all contenders run in this
process. With several threads each has its own process, because idle threads of one engine would disturb the
others. The processes stay alive and take turns. A pause and an untimed text precede each turn, because
threads that have slept need some milliseconds to spread over the cores.

Where weights are rounded, the loss is measured too: over the first tokens of the last 10 % of a corpus, in
windows of the block size, each token given those before it. Our native engine reads them one at a time, as it
writes.

The memory limit is the bandwidth of one thread that repeatedly reads a buffer in order. It is measured in the
same run, over as many bytes as a token needs in fp32: all weights but the position table, and the keys and
values so far.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; this file would hide the package `generation`.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from app.cli import options  # noqa: E402
from attention_ext import PARTS, extension  # noqa: E402
from attention_ext.parts import CachePrecision, Precision  # noqa: E402
from benchmarks.peers import PEERS, ROUNDED_PEERS  # noqa: E402
from generation.engine import ENGINES, open_engine  # noqa: E402
from generation.sampling import Sampling  # noqa: E402
from generation.writer import Request, Writer  # noqa: E402
from lab import saved  # noqa: E402
from lab.machine import Load, closing_text, describe, fma_peak, read_bandwidth  # noqa: E402
from model import corpus, load  # noqa: E402
from model.gpt import GPT  # noqa: E402

# Largest errors of logits; a contender with a larger one is wrong and not timed.
MOST_ERROR = 1e-3
MOST_ERROR_OF_PEERS = {
    "LlamaCpp": 1e-2,  # its GELU is the tanh approximation in half precision
    "LlamaCppQ8": 1.0,
    "CTranslate2Int8": 1.0,
}
MOST_ERROR_OF_WEIGHTS = {  # the table shows the rounding of the weights; tests check it more closely
    Precision.FP32: MOST_ERROR,
    Precision.BF16: 1e-1,
    Precision.INT8: 5e-1,
}
LOSS_TOKENS = 16_384  # tokens over which a loss is measured
MOST_ERROR_OF_CACHES = {CachePrecision.FP32: MOST_ERROR, CachePrecision.BF16: 1e-1}
LEAST_SECONDS = 0.05  # of one measurement
SAMPLE_BYTES = 4 << 20  # read in a bandwidth sample; as many as a token of the first case reads
PAUSE_SECONDS = 0.3  # in which idle threads of another process fall asleep
BUSY_EXIT_CODE = 3
FORMAT = 1  # of the file that --save writes
ROUNDED_WEIGHTS = [each.value for each in Precision if each is not Precision.FP32]
MEMORY_LIMIT = "memory limit"  # the last row of a table
Call = Callable[..., tuple[float, Any]]  # runs the named method of a Peer: (seconds, result as a list)


@dataclass(frozen=True)
class Case:
    """`count` tokens after a prompt of `prompt` tokens, in each of `batch` texts."""

    model: str
    batch: int
    prompt: int
    count: int
    slow_without_cache: bool = False  # takes longer than some 20 s


CASES = {
    "batch1": Case("shakes256", 1, 1, 255),
    "batch32": Case("shakes256", 32, 1, 255, slow_without_cache=True),
    "long": Case("shakes2048", 1, 1, 2047, slow_without_cache=True),
    "prefill": Case("shakes2048", 1, 1024, 1),
}


@dataclass(frozen=True)
class Contender:
    """An engine that takes part, before it is opened.

    engine: one of ENGINES, with a part and the precisions of its weights and its cache; or, without a part, a
    key of PEERS.
    """

    engine: str
    part: str | None = None
    weights: Precision = Precision.FP32
    kv_cache: CachePrecision = CachePrecision.FP32

    @property
    def name(self) -> str:
        """Its name in the table; a peer's has a version too once it is opened."""
        precision = None if self.weights is Precision.FP32 else self.weights
        cache = None if self.kv_cache is CachePrecision.FP32 else f"kv-{self.kv_cache}"
        return " ".join(filter(None, (self.engine, self.part, precision, cache)))

    @property
    def rounded(self) -> bool:
        """Whether its weights are rounded."""
        return self.weights is not Precision.FP32 or self.engine in ROUNDED_PEERS

    @property
    def most_error(self) -> float:
        """The largest error that its logits may have."""
        if self.part is None:
            return MOST_ERROR_OF_PEERS.get(self.engine, MOST_ERROR)
        return max(MOST_ERROR_OF_WEIGHTS[self.weights], MOST_ERROR_OF_CACHES[self.kv_cache])


@dataclass(frozen=True)
class Opened:
    """A contender that is ready. name: in the table. call: runs a method of its Peer."""

    contender: Contender
    name: str
    call: Call


class Own:
    """One of our engines as a peer, driven by generation.writer.Writer as gpt.py does."""

    def __init__(self, model: GPT, contender: Contender, slots: int) -> None:
        assert contender.part
        self.name = contender.name
        self.engine = open_engine(
            model,
            contender.engine,
            part=contender.part,
            weights=contender.weights,
            kv_cache=contender.kv_cache,
            slots=slots,
        )

    def logits(self, ids: list[int]) -> Tensor:
        self.engine.prefill(0, ids)
        return self.engine.logits(0)

    def every_logits(self, ids: list[int]) -> Tensor:
        rows = [self.logits(ids[:1])]
        for token in ids[1:]:
            self.engine.push(0, token)
            rows.append(self.engine.logits(0))
        return torch.stack(rows)  # (T, V)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        writer = Writer(self.engine, len(prompts))
        greedy = Sampling(temperature=0)
        texts = {
            writer.join(Request(prompt, sampling=greedy, max_new_tokens=count)): list[int]()
            for prompt in prompts
        }
        while written := writer.step():
            for text, tokens in written:
                texts[text] += tokens
        return list(texts.values())

    def prefill(self, ids: list[int]) -> None:
        self.greedy(ids, 1)


def local(contender: Contender, case: str, threads: int) -> Opened | None:
    """A contender in this process; None if it is not installed."""
    torch.set_num_threads(threads)
    model = load(CASES[case].model).model
    try:
        if contender.part is None:
            peer = PEERS[contender.engine](model, threads)
        else:
            peer = Own(model, contender, CASES[case].batch)
    except ImportError:
        return None

    def call(method: str, *arguments: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        result = getattr(peer, method)(*arguments)
        seconds = time.perf_counter() - start
        return seconds, result.tolist() if isinstance(result, Tensor) else result

    return Opened(contender, peer.name, call)


def remote(contender: Contender, case: str, threads: int, stack: ExitStack) -> Opened | None:
    """The same in its own process, which lives until the stack is closed."""
    pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

    def call(*task: Any) -> tuple[float, Any]:
        return pool.submit(answer, contender, case, threads, *task).result()

    name = pool.submit(answer, contender, case, threads).result()
    return Opened(contender, name, call) if name else None


opened_once = cache(local)


def answer(contender: Contender, case: str, threads: int, *task: Any) -> Any:
    """Answer remote() in the contender's process: a call's result, or the name; None if not installed."""
    opened = opened_once(contender, case, threads)
    if opened is None:
        return None
    return opened.call(*task) if task else opened.name


def exact_logits(model: GPT, ids: list[int]) -> Tensor:
    """Logits (V,) after `ids` in float64."""
    exact = GPT(model.config, partial(F.scaled_dot_product_attention, is_causal=True)).double().eval()
    exact.load_state_dict(model.state_dict())
    with torch.inference_mode():
        return exact(torch.tensor([ids]), last_only=True)[0, -1]


def bytes_per_token(model: GPT, case: Case) -> float:
    """Bytes that one token of a single text must read, on average: weights, and K and V of the context."""
    context = case.prompt + (case.count - 1) / 2  # the last token sees all others
    return 4 * model.num_params() + 4 * 2 * model.config.n_layer * model.config.n_embd * context


def agreement(texts: list[list[int]], expected: list[int]) -> int:
    """The number of tokens before the first difference, in the text that differs first."""
    return min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(t, expected))) for t in texts)


@dataclass
class Figures:
    """One contender's figures.

    error: the largest error of its logits. agreement: how much of its greedy text is as expected. seconds: of
    each round; empty if it was wrong and not timed. loss: nats a token; None where it was not measured.
    """

    error: float
    agreement: str = ""
    seconds: list[float] = field(default_factory=list)
    loss: float | None = None


def windows(ids: list[int], size: int) -> list[list[int]]:
    """The first LOSS_TOKENS of ids, in windows of size + 1 that share the token between them."""
    return [ids[at : at + size + 1] for at in range(0, min(LOSS_TOKENS, len(ids) - size), size)]


def loss(every_logits: Callable[[list[int]], Tensor], texts: list[list[int]]) -> float:
    """Mean loss of the tokens of each text but the first, in nats."""
    total = sum(
        F.cross_entropy(every_logits(ids[:-1]).double(), torch.tensor(ids[1:]), reduction="sum")
        for ids in texts
    )
    return float(total) / sum(len(ids) - 1 for ids in texts)


def exact_loss(model: GPT, texts: list[list[int]]) -> float:
    """The same of the model's own weights, in float32."""
    with torch.inference_mode():
        return loss(lambda ids: model(torch.tensor([ids]))[0], texts)


def run_case(
    title: str, contenders: list[Opened], rounds: int, watch: Load, apart: bool, text: str | None
) -> dict[str, dict[str, Any]]:
    """Verify, time and print one case, the contenders in turn; gives what is saved of each.

    apart: each has a process of its own. text: a corpus, for the loss of rounded weights.
    """
    case = CASES[title]
    checkpoint = load(case.model)
    model = checkpoint.model
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(100, case.prompt),)).tolist()
    prompt = ids if case.prompt > 1 else [0]  # a line end
    figures, first = verify(case, model, contenders, ids, prompt)
    calls = {opened.name: opened.call for opened in contenders}
    repeats = {name: max(1, round(LEAST_SECONDS / seconds)) for name, seconds in first.items()}
    for _ in range(rounds):
        for name, count in repeats.items():
            if apart:
                time.sleep(PAUSE_SECONDS)
                calls[name](*task(case, prompt))
            spent = sum(calls[name](*task(case, prompt))[0] for _ in range(count))
            figures[name].seconds.append(spent / count)
            watch.sample(SAMPLE_BYTES)
    texts = []
    if text is not None and case.batch == 1 < case.count:
        texts = windows(checkpoint.tokenizer.encode(corpus.split(text)[1]), model.config.block_size)
    for opened in contenders if texts else []:
        if opened.contender.rounded and opened.name in first:
            figures[opened.name].loss = loss(
                lambda ids, call=opened.call: torch.as_tensor(call("every_logits", ids)[1]),  # type: ignore[misc]
                texts,
            )
    needed = bytes_per_token(model, case)
    bandwidth = read_bandwidth(int(needed)) if case.batch == 1 < case.count else 0.0
    click.echo(f"\n{title}: {case.model}, {case.prompt} + {case.count} tokens, batch {case.batch}\n")
    limit = case.count * needed / bandwidth if bandwidth else None
    table(case, figures, limit)
    if texts:
        count = sum(len(ids) - 1 for ids in texts)
        click.echo(f"\nThe loss of fp32 over {count:,} tokens is {exact_loss(model, texts):.4f} nats")
    if bandwidth:
        click.echo(f"\nA token needs {needed / 1e6:.2f} MB, read by one thread at {bandwidth / 1e9:.0f} GB/s")
    kept: dict[str, dict[str, Any]] = {
        name: {key: value for key, value in asdict(each).items() if value is not None}
        for name, each in figures.items()
    }
    for name, row in summary(case, figures, limit).items():
        kept[name] = row | kept.get(name, {})
    return kept


def task(case: Case, prompt: list[int]) -> tuple[Any, ...]:
    """The method of a Peer that a case times, and its arguments."""
    if case.batch > 1:
        return "greedy_batch", [prompt] * case.batch, case.count
    return ("greedy", prompt, case.count) if case.count > 1 else ("prefill", prompt)


def verify(
    case: Case, model: GPT, contenders: list[Opened], ids: list[int], prompt: list[int]
) -> tuple[dict[str, Figures], dict[str, float]]:
    """Each contender's figures before it is timed, and the seconds of one call of those that are right.

    ids: tokens after which logits are compared. prompt: the start of the case's texts.
    """
    exact = exact_logits(model, ids)
    expected = Own(model, Contender("torch", "part4"), 1).greedy(prompt, case.count)
    figures, seconds = {}, {}
    for opened in contenders:
        name, call = opened.name, opened.call
        figures[name] = Figures(float((torch.tensor(call("logits", ids)[1]) - exact).abs().max()))
        if not figures[name].error <= opened.contender.most_error:
            continue
        seconds[name], result = call(*task(case, prompt))
        if case.count == 1:
            continue
        written = result if case.batch > 1 else [result]
        figures[name].agreement = f"{agreement(written, expected)} of {case.count}"
        if case.batch > 1:
            alone = agreement(written, call("greedy", prompt, case.count)[1])
            if alone < case.count:
                figures[name].agreement += f", {alone} as when alone"
    return figures, seconds


def summary(case: Case, figures: dict[str, Figures], limit: float | None) -> dict[str, dict[str, float]]:
    """Figures derived from the times: those of each contender that was timed, then of MEMORY_LIMIT.

    tokens_per_second, or ms where a case only reads a prompt: of the median time. spread: the interquartile
    range, as a share of the median. relative: the time, as a multiple of the first contender's.
    limit: in seconds.
    """
    times = {name: each.seconds for name, each in figures.items() if each.seconds}
    if limit and times:
        times[MEMORY_LIMIT] = [limit]
    result: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        time, first = statistics.median(seconds), statistics.median(next(iter(times.values())))
        rate = {"tokens_per_second": case.batch * case.count / time} if case.count > 1 else {"ms": 1e3 * time}
        result[name] = rate | {"relative": time / first}
        if len(seconds) > 1:
            low, _, high = statistics.quantiles(seconds, n=4)
            result[name]["spread"] = (high - low) / time
    return result


def table(case: Case, figures: dict[str, Figures], limit: float | None) -> None:
    """Print the figures, relative to the first contender timed. limit: the memory limit, in seconds."""
    rows = summary(case, figures, limit)
    one, unit = next(iter(rows), "none"), "tokens/s" if case.count > 1 else "ms"
    most = rows.get(MEMORY_LIMIT)
    click.echo(
        f"| contender | {unit} | spread | of memory limit | {one} = 1 | logit error | loss | greedy text |"
    )
    click.echo("|---" * 8 + "|")
    for name, each in figures.items():
        if name not in rows:
            click.echo(f"| {name} | wrong, so not timed | | | | {each.error:.0e} | | |")
            continue
        row = rows[name]
        figure = f"{row['ms']:.2f}" if "ms" in row else f"{row['tokens_per_second']:.0f}"
        nats = "" if each.loss is None else f"{each.loss:.4f}"
        share = f"{100 * most['relative'] / row['relative']:.0f} %" if most else ""
        click.echo(
            f"| {name} | {figure} | {100 * row['spread']:.0f} % | {share} "
            f"| {row['relative']:.2f} | {each.error:.0e} | {nats} | {each.agreement} |"
        )
    if most:
        click.echo(
            f"| {MEMORY_LIMIT} | {most['tokens_per_second']:.0f} | | 100 % | {most['relative']:.2f} | | | |"
        )


@click.command()
@click.option("--cases", default=",".join(CASES), show_default=True, help="Cases to time.")
@click.option("--engines", default=",".join(ENGINES), show_default=True, help="Our engines that take part.")
@click.option("--parts", default="part4", show_default=True, help="Parts that take part, in each engine.")
@click.option("--peers", "others", default=",".join(PEERS), help="Other engines.  [default: all installed]")
@click.option(
    "--weights",
    default=",".join(ROUNDED_WEIGHTS),
    show_default=True,
    help="Precisions of the native engine, beside fp32.",
)
@click.option(
    "--corpus",
    "corpus_file",
    type=click.Path(),
    help="Text for the loss of rounded weights.  [default: what `gpt.py prepare` got]",
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of each.")
@click.option("--rounds", type=click.IntRange(2), default=5, show_default=True, help="Rounds of each.")
@options.save("generation", "the figures")
@click.option(
    "--slow/--no-slow", help="Include contenders that take longer than some 20 s.  [default: no-slow]"
)
def main(
    cases: str,
    engines: str,
    parts: str,
    others: str,
    weights: str,
    corpus_file: str | None,
    threads: int,
    rounds: int,
    save: str | None,
    slow: bool,
) -> None:
    """Time text generation, our engines against others; print a Markdown table for each case."""
    torch.set_num_threads(threads)
    given = (cases, engines, parts, others, weights)
    chosen = [[name for name in text.split(",") if name] for text in given]
    for names, allowed in zip(chosen, map(list[str], (CASES, ENGINES, PARTS, PEERS, ROUNDED_WEIGHTS))):
        if wrong := [name for name in names if name not in allowed]:
            raise click.UsageError(f"{wrong[0]!r} must be one of {', '.join(allowed)}")
    if save:
        try:
            saved.check_file(save)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    text = None
    if corpus_file or corpus.INPUT.exists():
        text = corpus.read(Path(corpus_file) if corpus_file else corpus.INPUT)
    contenders = [Contender(e, p) for p in chosen[2] for e in chosen[1] if e == "torch" or PARTS[p].operator]
    native = [each for each in contenders if each.engine == "native"]
    contenders += [replace(each, weights=Precision(name)) for each in native for name in chosen[4]]
    contenders += [replace(each, kv_cache=CachePrecision.BF16) for each in native]
    contenders += map(Contender, chosen[3])
    click.echo(f"{extension.describe('auto')}; PyTorch {torch.__version__}")
    watch = Load()  # from here: the compilers are done
    peaks = [fma_peak()]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in chosen[0]:
        ready = []
        with ExitStack() as stack:
            for each in list(contenders):
                if each.engine == "UncachedPyTorch" and CASES[name].slow_without_cache and not slow:
                    click.echo(f"\n{name}: {each.name} is slow and left out; --slow includes it")
                    continue
                opened = remote(each, name, threads, stack) if threads > 1 else local(each, name, threads)
                if opened:
                    ready.append(opened)
                else:
                    contenders.remove(each)
                    click.echo(f"{each.name} is not installed")
            results[name] = run_case(name, ready, rounds, watch, threads > 1, text)
    peaks.append(fma_peak())
    closing, busy = closing_text(watch, peaks, threads)
    if save:
        content = {
            "format": FORMAT,
            "machine": describe() | {"simd_name": extension.load().simd_name()},
            "threads": threads,
        }
        content |= {"rounds": rounds, "busy": closing.splitlines()[-1] if busy else None, "cases": results}
        saved.write(content, Path(save))
    click.echo(f"\n{closing}")
    if busy:
        sys.exit(BUSY_EXIT_CODE)


if __name__ == "__main__":
    main()
