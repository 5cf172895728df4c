"""Generating text against other engines on the same weights: verified, interleaved, medians.

    python -m benchmarks.generation [--cases batch1,long] [--threads 1] [--peers CTranslate2]
        [--corpus FILE] [--save [FILE]]
    python -m benchmarks.generation --device cuda [--cases batch1024] [--dtypes bf16] [--peers GraphPyTorch]

Before a contender is timed, its logits are compared with float64, and its greedy text with that of our
PyTorch engine. Equally likely tokens may be chosen differently, so a different text is only reported. A
wrong contender is not timed, and the exit code is 1. One that fails or is not installed is a row with the
reason. Times are of whole texts, with the prompt and each engine's Python loop. With one thread all
contenders run in this process. With several threads each has its own process, because idle threads of one
engine would disturb the others. The processes stay alive and take turns. A pause and an untimed text precede
each turn, because threads that have slept need some milliseconds to spread over the cores.

Where weights are rounded, the loss is measured too: over the first tokens of the last 10 % of a corpus, in
windows of the block size, each token given those before it. Our native engine reads them one at a time, as it
writes.

The memory limit is the bandwidth of one thread that repeatedly reads a buffer in order. It is measured in the
same run, over as many bytes as a token needs in fp32: all weights but the position table, and the keys and
values so far.
"""

import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measuring import QUIET, attempt, failed_row, percent, show_table, spread, write
from benchmarks.peers import Peer
from benchmarks.peers.ctranslate import CTranslate2, CTranslate2Int8
from benchmarks.peers.llama import LlamaCpp, LlamaCppQ8
from benchmarks.peers.pytorch import CachedPyTorch, Transformers, UncachedPyTorch
from shakespeare.app.cli import options
from shakespeare.attention_ext import PARTS, extension
from shakespeare.attention_ext.parts import BuildError, CachePrecision, Precision
from shakespeare.generation.engines.table import ENGINES, open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.lab import saved
from shakespeare.lab.machine import Load, closing_text, describe, fma_peak, read_bandwidth
from shakespeare.lab.timing import PATIENCE, Samples
from shakespeare.model import corpus, load
from shakespeare.model.gpt import GPT

PYTORCH = (UncachedPyTorch, CachedPyTorch, Transformers)
OTHERS = (CTranslate2, CTranslate2Int8, LlamaCpp, LlamaCppQ8)
PEERS: dict[str, type[Peer]] = {peer.__name__: peer for peer in (*PYTORCH, *OTHERS)}
# of on_gpu.py, beside PYTORCH
ON_GPU = dict.fromkeys(("GraphPyTorch", "CompiledPyTorch", "CompiledGraphPyTorch"))
# The largest errors of our logits. The table shows the rounding of weights; tests check it more closely.
MOST_ERROR = {"fp32": Peer.most_error, "bf16": 1e-1, "int8": 5e-1}
LOSS_TOKENS = 16_384  # tokens over which a loss is measured
LEAST_SECONDS = 0.05  # of one measurement
SAMPLE_BYTES = 4 << 20  # read in a bandwidth sample; as many as a token of the first case reads
PAUSE_SECONDS = 0.3  # in which idle threads of another process fall asleep
WRONG_EXIT_CODE, BUSY_EXIT_CODE = 1, 3
FORMAT = 1  # of the file that --save writes
ROUNDED = [each.value for each in Precision if each is not Precision.FP32]
MEMORY_LIMIT = "memory limit"  # the last row of a table


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
    "batch1024": Case("shakes256", 1024, 1, 255),
    "batch8192": Case("shakes256", 8192, 1, 255),
}
ON_CPU = ("batch1", "batch32", "long", "prefill")  # the cases that are timed there by default


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


class Own(Peer):
    """One of our engines as a peer, driven by generation.writer.Writer as gpt.py does."""

    def __init__(self, model: GPT, contender: Contender, slots: int, device: str = "cpu") -> None:
        assert contender.part
        self.name = contender.name
        self.rounded = contender.weights is not Precision.FP32
        self.most_error = max(MOST_ERROR[contender.weights], MOST_ERROR[contender.kv_cache])
        self.engine = open_engine(
            model,
            contender.engine,
            part=contender.part,
            weights=contender.weights,
            kv_cache=contender.kv_cache,
            slots=slots,
            device=device,
        )

    def logits(self, ids: list[int]) -> Tensor:
        self.engine.begin(0, ids)
        self.engine.read(0)
        return torch.tensor(self.engine.logits(0))

    def every_logits(self, ids: list[int]) -> Tensor:
        self.logits(ids[:1])
        rows = []
        for token in [*ids[1:], 0]:  # chosen by a bias, from the logits before it
            self.engine.set_sampling(0, Sampling(0, logit_bias=((token, 100),)))
            self.engine.write([0], [[0.0]])
            rows.append(self.engine.logits(0))
        return torch.tensor(rows)  # (T, V)

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        greedy = Sampling(temperature=0)
        return write(self.engine, [Request(ids, sampling=greedy, max_new_tokens=count) for ids in prompts])


class Opened:
    """A contender, which is ready after open()."""

    peer: Peer

    def __init__(self, contender: Contender, case: str, threads: int) -> None:
        self._contender, self._case, self._threads = contender, CASES[case], threads

    def open(self) -> None:
        """Load the model into the engine."""
        torch.set_num_threads(self._threads)
        self.peer = self.made(load(self._case.model).model)

    def made(self, model: GPT) -> Peer:
        """The engine."""
        if self._contender.part is None:
            return PEERS[self._contender.engine](model, self._threads)
        return Own(model, self._contender, self._case.batch)

    def get(self, name: str) -> Any:
        """An attribute of its Peer."""
        return getattr(self.peer, name)

    def call(self, method: str, *arguments: Any) -> tuple[float, Any]:
        """(seconds, result as a list) of a method of its Peer."""
        start = time.perf_counter()
        result = getattr(self.peer, method)(*arguments)
        seconds = time.perf_counter() - start
        return seconds, result.tolist() if isinstance(result, Tensor) else result

    def loss(self, texts: list[list[int]]) -> float:
        """The mean loss of texts."""
        return loss(self.peer.every_logits, texts)


def open_all(contenders: dict[str, Opened], failed: dict[str, str]) -> list[Opened]:
    """Open contenders, by their names; those that are ready."""
    for name, each in contenders.items():
        attempt(failed, name, each.open)
    return [each for name, each in contenders.items() if name not in failed]


class OwnProcess(BaseManager):
    """A process in which a contender is opened; it lives until the `with` block ends."""

    open: Callable[[Contender, str, int], Opened]


OwnProcess.register("open", Opened)


def exact_logits(model: GPT, ids: list[int]) -> Tensor:
    """Logits (V,) after `ids` in float64."""
    exact = GPT(model.config, partial(F.scaled_dot_product_attention, is_causal=True)).double().eval()
    exact.load_state_dict(model.state_dict())
    with torch.inference_mode():
        return exact(torch.tensor([ids]), last_only=True)[0, -1]


def bytes_per_token(model: GPT, case: Case) -> float:
    """Bytes that one token of a single text must read, on average: weights, and K and V of the context."""
    context = case.prompt + (case.count - 1) / 2  # the last token sees all others
    return 4 * model.config.num_params + 4 * 2 * model.config.n_layer * model.config.n_embd * context


def agreement(texts: list[list[int]], expected: list[int]) -> int:
    """The number of tokens before the first difference, in the text that differs first."""
    return min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(t, expected))) for t in texts)


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


def run_case(
    title: str,
    contenders: list[Opened],
    rounds: int,
    watch: Load,
    apart: bool,
    text: str | None,
    failed: dict[str, str],
) -> dict[str, dict[str, Any]]:
    """Verify, time and print one case, the contenders in turn; gives the figures of each, see show().

    apart: each has a process of its own. text: a corpus, for the loss of rounded weights. failed: contenders
    that cannot be opened, with the reason.
    """
    case = CASES[title]
    checkpoint = load(case.model)
    model = checkpoint.model
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(100, case.prompt),)).tolist()
    prompt = ids if case.prompt > 1 else [0]  # a line end
    opened = {each.get("name"): each for each in contenders}
    figures, first = verify(case, model, opened, ids, prompt, failed)
    repeats = {name: max(1, round(LEAST_SECONDS / seconds)) for name, seconds in first.items()}

    def turn(name: str) -> None:
        call = partial(opened[name].call, *task(case, prompt))
        if apart:
            time.sleep(PAUSE_SECONDS)
            call()
        before = watch.sample(SAMPLE_BYTES, PATIENCE)
        figures[name]["seconds"].append(sum(call()[0] for _ in range(repeats[name])) / repeats[name])
        figures[name].setdefault("paces", []).append(min(before, watch.sample(SAMPLE_BYTES)))

    figures |= in_rounds(rounds, repeats, turn, failed)
    click.echo(f"\n{title}: {case.model}, {case.prompt} + {case.count} tokens, batch {case.batch}\n")
    if case.batch > 1 or case.count == 1:
        show(case, figures)
        return figures
    texts = []
    if text is not None:
        texts = windows(checkpoint.tokenizer.encode(corpus.split(text)[1]), model.config.block_size)
        for name in first:
            if name not in failed and opened[name].get("rounded"):
                figures[name]["loss"] = opened[name].loss(texts)
    needed = bytes_per_token(model, case)
    bandwidth = read_bandwidth(int(needed))
    limit = {MEMORY_LIMIT: {"seconds": [case.count * needed / bandwidth]}} if first else {}
    show(case, figures | limit)
    if texts:
        with torch.inference_mode():
            exact = loss(lambda ids: model(torch.tensor([ids]))[0], texts)
        count = sum(len(ids) - 1 for ids in texts)
        click.echo(f"\nThe loss of fp32 over {count:,} tokens is {exact:.4f} nats")
    click.echo(f"\nA token needs {needed / 1e6:.2f} MB, read by one thread at {bandwidth / 1e9:.0f} GB/s")
    for each in limit.values():
        del each["seconds"]  # it was not timed
    return figures | limit


def task(case: Case, prompt: list[int]) -> tuple[Any, ...]:
    """The method of a Peer that a case times, and its arguments."""
    return ("greedy_batch", [prompt] * case.batch, case.count) if case.count > 1 else ("prefill", prompt)


def verify(
    case: Case,
    model: GPT,
    contenders: dict[str, Opened],
    ids: list[int],
    prompt: list[int],
    failed: dict[str, str],
    part: str = "part4",
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Each contender's figures before it is timed, and the seconds of one call of those that are right.

    ids: tokens after which logits are compared. prompt: the start of the case's texts. failed: gets the
    reasons of those that raise an error. part: that writes what is expected.
    """
    exact = exact_logits(model, ids)
    (expected,) = Own(model, Contender("torch", part), 1).greedy_batch([prompt], case.count)
    figures: dict[str, dict[str, Any]] = {}
    seconds = {}

    def check(name: str, opened: Opened) -> None:
        error = float((torch.tensor(opened.call("logits", ids)[1]) - exact).abs().max())
        figures[name] = {"error": error, "agreement": "", "seconds": []}
        if not error <= opened.get("most_error"):
            return
        seconds[name], written = opened.call(*task(case, prompt))
        if case.count == 1:
            return
        figures[name]["agreement"] = f"{agreement(written, expected)} of {case.count}"
        if case.batch > 1:
            alone = agreement(written, opened.call("greedy_batch", [prompt], case.count)[1][0])
            if alone < case.count:
                figures[name]["agreement"] += f", {alone} as when alone"

    for name, opened in contenders.items():
        attempt(failed, name, check, name, opened)
    return figures, {name: each for name, each in seconds.items() if name not in failed}


def in_rounds(
    rounds: int, names: Iterable[str], turn: Callable[[str], None], failed: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Let contenders take turns; the figures of all that have failed, now or before."""
    for _ in range(rounds):
        for name in names:
            if name not in failed:
                attempt(failed, name, turn, name)
    return {name: {"failed": reason, "seconds": []} for name, reason in failed.items()}


def any_wrong(cases: dict[str, dict[str, dict[str, Any]]]) -> bool:
    """Whether the check refused a contender in a case."""
    return any("error" in each and not each["seconds"] for case in cases.values() for each in case.values())


def show(case: Case, figures: dict[str, dict[str, Any]]) -> None:
    """Print the figures, after adding those that follow from the seconds of each round.

    The figures are: failed, the reason if there are no others. error, the largest of its logits. agreement:
    how much of its greedy text is as expected. seconds: of each round; empty if it was wrong. paces: the
    machine's speed beside them, if it was sampled. quiet, all: how many rounds were quiet, and the median of
    all relative to theirs. loss: nats a token, if it was measured. tokens_per_second, or ms where a case only
    reads a prompt: of the median time in quiet rounds. relative: the time, as a multiple of the first
    contender's. spread: the interquartile range, as a share of the median.
    """
    timed = {name: each for name, each in figures.items() if each["seconds"]}
    for each in timed.values():
        samples, first = map(samples_of, (each, next(iter(timed.values()))))
        time, seconds = samples.median, samples.counted
        rate = {"tokens_per_second": case.batch * case.count / time}
        each |= rate if case.count > 1 else {"ms": 1e3 * time}
        each |= {"relative": time / first.median} | ({"spread": spread(seconds)} if len(seconds) > 1 else {})
        if "paces" in each:
            each |= {"quiet": samples.quiet, "all": samples.disturbance}
    unit, one = "tokens/s" if case.count > 1 else "ms", next(iter(timed), "none")
    show_table(
        f"contender | {unit} | spread | {QUIET} | of memory limit | {one} = 1 | logit error | loss "
        "| greedy text",
        (row(name, each, figures.get(MEMORY_LIMIT)) for name, each in figures.items()),
    )


def samples_of(figures: dict[str, Any]) -> Samples:
    """The times of a contender; without paces all are quiet."""
    return Samples(figures["seconds"], figures.get("paces", [1.0] * len(figures["seconds"])))


def row(name: str, each: dict[str, Any], limit: dict[str, Any] | None) -> str:
    """A row of the table. limit: the figures of the memory limit."""
    if "failed" in each:
        return failed_row(name, each["failed"])
    if "relative" not in each:
        return f"{name} | wrong, so not timed | | | | | | {each['error']:.0e} | | "
    cells = [
        name,
        f"{each['ms']:.2f}" if "ms" in each else f"{each['tokens_per_second']:.0f}",
        percent(each["spread"]) if "spread" in each else "",
        each.get("quiet", ""),
        f"{each['all']:.2f}" if "all" in each else "",
        percent(limit["relative"] / each["relative"]) if limit else "",
        f"{each['relative']:.2f}",
        f"{each['error']:.0e}" if "error" in each else "",
        f"{each['loss']:.4f}" if "loss" in each else "",
        each.get("agreement", ""),
    ]
    return " | ".join(cells)


@click.command(context_settings={"show_default": True})
@options.cpu_or_cuda
@options.names("--dtypes", "Formats of weights and cache on a GPU.", of=("fp32", "bf16"), default="fp32,bf16")
@options.names(
    "--cases", "Cases to time.", of=CASES, show_default=f"{','.join(ON_CPU)}; on a GPU all", default=None
)
@options.names("--engines", "Our engines that take part.", of=ENGINES, default=",".join(ENGINES))
@options.names("--parts", "Parts that take part, in each engine.", of=PARTS, default="part4")
@options.names(
    "--peers",
    "Other engines.",
    of=ChainMap[str, Any](PEERS, ON_GPU),
    default=",".join((*PEERS, *ON_GPU)),
    show_default="all installed",
)
@options.names(
    "--weights",
    "Precisions of the native engine, beside fp32.",
    of=ROUNDED,
    default=",".join(ROUNDED),
)
@options.path(
    "--corpus", "file", "Text for the loss of rounded weights.", show_default="what `gpt.py prepare` got"
)
@options.whole("--threads", "Threads of each.", default=1)
@options.whole("--rounds", "Rounds of each.", least=2, default=5)
@options.save("generation", "the figures")
@options.flag("--slow/--no-slow", "Include contenders that take longer than some 20 s.")
def main(
    device: str,
    dtypes: tuple[str, ...],
    cases: tuple[str, ...] | None,
    engines: tuple[str, ...],
    parts: tuple[str, ...],
    peers: tuple[str, ...],
    weights: tuple[str, ...],
    file: Path | None,
    threads: int,
    rounds: int,
    save: str | None,
    slow: bool,
) -> None:
    """Time text generation, our engines against others; print a Markdown table for each case."""
    torch.set_num_threads(threads)
    if save:
        try:
            saved.check_file(save)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    if device == "cuda":
        from benchmarks import on_gpu

        try:
            content = on_gpu.compare(cases or tuple(CASES), engines, dtypes, peers, rounds)
        except BuildError as error:
            raise click.UsageError(str(error)) from None
        if save:
            saved.write(content | {"format": FORMAT, "rounds": rounds}, Path(save))
        sys.exit(WRONG_EXIT_CODE if any_wrong(content["cases"]) else 0)
    cases = cases or ON_CPU
    text = corpus.read(file or corpus.INPUT) if file or corpus.INPUT.exists() else None
    on_cpu = [engine for engine in engines if "cpu" in ENGINES[engine].devices]
    contenders = [Contender(e, p) for p in parts for e in on_cpu if e == "torch" or PARTS[p].operator]
    native = [each for each in contenders if each.engine == "native"]
    contenders += [replace(each, weights=Precision(name)) for each in native for name in weights]
    contenders += [replace(each, kv_cache=CachePrecision.BF16) for each in native]
    contenders += [Contender(name) for name in peers if name in PEERS]
    click.echo(f"{extension.describe('auto')}; PyTorch {torch.__version__}")
    watch = Load()  # from here: the compilers are done
    peaks = [fma_peak()]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in cases:
        with ExitStack() as stack:
            asked, failed = dict[str, Opened](), dict[str, str]()
            for each in contenders:
                if each.engine == "UncachedPyTorch" and CASES[name].slow_without_cache and not slow:
                    click.echo(f"\n{name}: {each.name} is slow and left out; --slow includes it")
                    continue
                if threads > 1:
                    process = stack.enter_context(OwnProcess(ctx=get_context("spawn")))
                asked[each.name] = (process.open if threads > 1 else Opened)(each, name, threads)
            ready = open_all(asked, failed)
            results[name] = run_case(name, ready, rounds, watch, threads > 1, text, failed)
    peaks.append(fma_peak())
    closing, busy = closing_text(watch, peaks, threads)
    if save:
        content = {
            "format": FORMAT,
            "machine": describe() | {"simd_name": extension.load().simd_name()},
            "threads": threads,
            "rounds": rounds,
            "busy": closing.splitlines()[-1] if busy else None,
            "cases": results,
        }
        saved.write(content, Path(save))
    click.echo(f"\n{closing}")
    if busy or any_wrong(results):
        sys.exit(BUSY_EXIT_CODE if busy else WRONG_EXIT_CODE)


if __name__ == "__main__":
    main()
