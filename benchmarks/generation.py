"""Generating text against other engines on the same weights: verified, in turns, medians.

    python -m benchmarks.generation [--cases batch1,long] [--peers CTranslate2] [--save [FILE]]
    python -m benchmarks.generation --cases 124M,124Mx8,124M-2t,124Mx8-2t,355M,355Mx8,355M-2t,355Mx8-2t
    python -m benchmarks.generation --device cuda [--cases batch1024] [--dtypes bf16] [--peers GraphPyTorch]

Before a contender is timed, its logits are compared with float64, and its greedy text with that of a loop in
PyTorch. Equally likely tokens may be chosen differently, so a different text is only reported. A wrong
contender is not timed, and the exit code is 1. One that fails or is not installed is a row with the reason.
Times are of whole texts, with the prompt and each engine's Python loop. The loop without a cache is left out
where it takes some 20 s. GPT-2's sizes have random weights, one thread or two (2t), one text or eight (x8).

Where weights are rounded, the loss is measured too: over the first tokens of the last 10 % of the text that
`gpt.py prepare` gets, in windows of the block size. Our native engine reads them one at a time, as it writes.

The memory limit is measured in the same run. On the CPU it is the rate at which one thread reads what a token
needs in fp32: all weights but the position table, and the keys and values so far. On a GPU it is the larger
one of two times of a step: of reading these once, and of the multiplications at the peak of FMA, in bf16 at
that of PyTorch's product of two large matrices. Weights and caches of few texts stay in a GPU's L2 cache;
what counts there is a step's latency.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import QUIET, attempt, percent, show_table
from benchmarks.peers import Peer, Texts
from benchmarks.peers.ctranslate import CTranslate2, CTranslate2Int8
from benchmarks.peers.graphs import GraphPyTorch
from benchmarks.peers.llama import LlamaCpp, LlamaCppQ8
from benchmarks.peers.ours import Own, name_of
from benchmarks.peers.pytorch import CachedPyTorch, Transformers, UncachedPyTorch
from shakespeare.app.cli import options
from shakespeare.attention_ext import extension
from shakespeare.attention_ext.parts import BuildError, CachePrecision, Dtype, Precision
from shakespeare.lab import machine, result_files
from shakespeare.lab.cuda.device import Gpu
from shakespeare.lab.timing import Cpu, Samples, Timer
from shakespeare.lab.timing import rounds as timed_rounds
from shakespeare.model import corpus, load
from shakespeare.model.config import GPTConfig
from shakespeare.model.gpt import GPT, causal_attention

OURS = {"cpu": ("native", "torch"), "cuda": ("torch", "cuda", "webgpu")}
ENGINES = dict.fromkeys([*OURS["cpu"], *OURS["cuda"]])
LIBRARIES = (CTranslate2, CTranslate2Int8, LlamaCpp, LlamaCppQ8)
PEERS: dict[str, dict[str, Callable[..., Peer]]] = {
    "cpu": {peer.__name__: peer for peer in (UncachedPyTorch, CachedPyTorch, Transformers, *LIBRARIES)},
    "cuda": {peer.__name__: peer for peer in (CachedPyTorch, Transformers, GraphPyTorch)},
}
DEVICE = "cuda"  # PyTorch's name of the GPU
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_ERROR_ON_GPU = {"fp32": Peer.most_error, "bf16": 0.5}
LOSS_TOKENS = 16_384  # tokens over which a loss is measured
MIN_SECONDS = 0.05  # of one measurement
SAMPLE_BYTES = 4 << 20  # read in a bandwidth sample; as many as a token of the first case reads
WRONG_EXIT_CODE = 1
BUSY_EXIT_CODE = 3
FORMAT = 1  # of the file that --save writes
MEMORY_LIMIT = "memory limit"  # the last row of a table

Figures = dict[str, dict[str, Any]]  # of each contender, see finished()
Open = Callable[[], Peer]


@dataclass(frozen=True)
class Case:
    """`count` tokens after a prompt of `prompt` tokens, in each of `batch` texts."""

    model: str
    batch: int
    prompt: int
    count: int
    slow_without_cache: bool = False  # takes longer than some 20 s
    threads: int = 1

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.model}, {self.prompt} + {self.count} tokens, batch {self.batch}{threads}"


CASES = {
    "batch1": Case("shakes256", 1, 1, 255),
    "batch32": Case("shakes256", 32, 1, 255, slow_without_cache=True),
    "long": Case("shakes2048", 1, 1, 2047, slow_without_cache=True),
    "prefill": Case("shakes2048", 1, 1024, 1),
    "batch1024": Case("shakes256", 1024, 1, 255),
    "batch8192": Case("shakes256", 8192, 1, 255),
}
GPT2 = {"124M": GPTConfig(), "355M": GPTConfig(n_layer=24, n_head=16, n_embd=1024)}
for size, batch, threads in itertools.product(GPT2, (1, 8), (1, 2)):
    name = size + (f"x{batch}" if batch > 1 else "") + (f"-{threads}t" if threads > 1 else "")
    CASES[name] = Case(size, batch, 4, 32, slow_without_cache=True, threads=threads)
ON_CPU = ("batch1", "batch32", "long", "prefill")  # the cases that are timed there by default
ON_GPU = [name for name, case in CASES.items() if case.model not in GPT2]
USUAL = f"{','.join(ON_CPU)}; on a GPU all but GPT-2's sizes"


@lru_cache(1)
def model_of(name: str) -> GPT:
    """A shipped model, or a random one of a size of GPT2."""
    torch.manual_seed(0)
    return GPT(GPT2[name], causal_attention).eval() if name in GPT2 else load(name).model


def on_cpu(case: Case, engines: Iterable[str], peers: Iterable[str]) -> dict[str, Open]:
    """The contenders of a case on the CPU, by their names before they are opened."""
    model = model_of(case.model)
    kinds = [(name, Precision.FP32, CachePrecision.FP32) for name in OURS["cpu"] if name in engines]
    if "native" in engines:
        kinds += [("native", weights, CachePrecision.FP32) for weights in (Precision.BF16, Precision.INT8)]
        kinds.append(("native", Precision.FP32, CachePrecision.BF16))
    contenders: dict[str, Open]
    contenders = {
        name_of(*contender): partial(Own, model, contender[0], case.batch, *contender[1:])
        for contender in kinds
    }
    for name, contender in PEERS["cpu"].items():
        if name in peers and not (contender is UncachedPyTorch and case.slow_without_cache):
            contenders[name] = partial(contender, model, case.threads)
    return contenders


def on_gpu(case: Case, dtype: str, engines: Iterable[str], peers: Iterable[str]) -> dict[str, Open]:
    """The contenders of a case on a GPU, with weights and cache in a dtype."""
    model = model_of(case.model)
    precisions = (Precision(dtype), CachePrecision(dtype))

    def opened(contender: Callable[..., Peer], *arguments: Any) -> Peer:
        peer = contender(model, *arguments)
        peer.name += "" if contender is Own else f" {dtype}"
        peer.most_error = MOST_ERROR_ON_GPU[dtype]
        return peer

    ours = [name for name in OURS["cuda"] if name in engines and (name != "webgpu" or dtype == "fp32")]
    contenders: dict[str, Open] = {
        name_of(name, *precisions): partial(opened, Own, name, case.batch, *precisions, DEVICE)
        for name in ours
    }
    for name, contender in PEERS["cuda"].items():
        if name in peers:
            contenders[f"{name} {dtype}"] = partial(opened, contender, 1, DEVICE, DTYPES[dtype])
    return contenders


def exact_logits(model: GPT, ids: list[int]) -> Tensor:
    """Logits (V,) after `ids` in float64."""
    exact = model.with_attention(partial(F.scaled_dot_product_attention, is_causal=True)).double()
    with torch.inference_mode():
        return exact(torch.tensor([ids]), last_only=True)[0, -1]


def agreement(texts: Texts, expected: list[int]) -> int:
    """The number of tokens before the first difference, in the text that differs first."""
    return len(os.path.commonprefix([*texts, expected]))


def loss(every_logits: Callable[[list[int]], Tensor], texts: Texts) -> float:
    """Mean loss of the tokens of each text but the first, in nats."""
    total = sum(
        F.cross_entropy(every_logits(ids[:-1]).double(), torch.tensor(ids[1:]), reduction="sum")
        for ids in texts
    )
    return float(total) / sum(len(ids) - 1 for ids in texts)


def measure(
    case: Case, contenders: Mapping[str, Open], rounds: int, clock: Cpu
) -> tuple[Figures, dict[str, Peer]]:
    """Open, verify and time contenders: their figures, see finished(), and those that are right."""
    model = model_of(case.model)
    failed = dict[str, str]()
    peers = dict[str, Peer]()
    timers = dict[str, Timer]()
    for name, opened in contenders.items():
        with attempt(failed, name):
            peer = opened()
            peers[peer.name] = peer
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(100, case.prompt),)).tolist()
    prompt = ids if case.prompt > 1 else [0]  # a line end
    exact = exact_logits(model, ids)
    (expected,) = CachedPyTorch(model, 1).greedy_batch([prompt], case.count)
    figures: Figures = {}

    def verified(name: str) -> Callable[[], Any] | None:
        """The call to time, after two untimed ones; None if the logits are wrong."""
        peer = peers[name]
        error = float((peer.logits(ids) - exact).abs().max())
        figures[name] = {"error": error, "agreement": ""}
        if not error <= peer.most_error:
            return None
        if case.count == 1:
            call: Callable[[], Any] = partial(peer.prefill, prompt)
            call()
        else:
            call = partial(peer.greedy_batch, [prompt for _ in range(case.batch)], case.count)
            texts = call()
            figures[name]["agreement"] = f"{agreement(texts, expected)} of {case.count}"
            if case.batch > 1:
                alone = agreement(texts, peer.greedy_batch([prompt], case.count)[0])
                if alone < case.count:
                    figures[name]["agreement"] += f", {alone} as when alone"
        return call

    def guard(samples: Samples) -> AbstractContextManager[None]:
        return attempt(failed, next(name for name, timer in timers.items() if timer.samples is samples))

    for name in peers:
        with attempt(failed, name):
            if call := verified(name):
                timers[name] = Timer(call, clock, MIN_SECONDS, once=clock.time(call, 1)[0])
    for _ in timed_rounds(list(timers.values()), rounds, guard):
        pass
    for name, timer in timers.items():
        figures[name].update(asdict(timer.samples))
    reasons = {name: {"failed": reason} for name, reason in failed.items()}
    return figures | reasons, {name: peers[name] for name in timers if name not in failed}


def rate(case: Case, seconds: float) -> dict[str, float]:
    """Tokens per second, or milliseconds where a case only reads a prompt."""
    if case.count == 1:
        return {"ms": 1e3 * seconds}
    return {"tokens_per_second": case.batch * case.count / seconds}


def finished(case: Case, figures: Figures, limit: float | None = None) -> Figures:
    """The figures, with those that follow from the seconds of each round and from the memory limit's seconds.

    Given: failed, the reason if there are no others. error: the largest of the logits. agreement: the share
    of greedy text as expected. seconds, every, paces: as in Samples; absent if wrong. loss: nats a token.
    Added: quiet, all: the quiet rounds, and the median of all over theirs. rate(): of the quiet
    median. relative: the time over the first contender's. spread: the interquartile range over the median.
    """
    samples = {
        name: Samples(seconds=f["seconds"], every=f["every"], paces=f["paces"])
        for name, f in figures.items()
        if "seconds" in f
    }
    if not samples:
        return figures
    first = next(iter(samples.values())).median
    for name, timed in samples.items():
        figures[name].update(
            **rate(case, timed.median),
            relative=timed.median / first,
            quiet=timed.quiet,
            all=timed.disturbance,
            spread=timed.spread,
        )
    if limit is None:
        return figures
    return figures | {MEMORY_LIMIT: rate(case, limit) | {"relative": limit / first}}


def show(case: Case, figures: Figures) -> None:
    """Print the figures as a table."""
    first = next((name for name, f in figures.items() if "relative" in f), "none")
    limit = figures.get(MEMORY_LIMIT, {}).get("relative")
    titles = f"contender | {'ms' if case.count == 1 else 'tokens/s'} | spread | {QUIET} | of memory limit"
    titles += f" | {first} = 1 | logit error | loss | greedy text"
    show_table(titles, (row(name, f, limit) for name, f in figures.items()))


def row(name: str, f: Mapping[str, Any], limit: float | None) -> str:
    """A row of the table. limit: the time of the memory limit, relative to the first contender's."""
    if "failed" in f:
        return f"{name} | {f['failed']}"
    if "relative" not in f:
        return f"{name} | wrong, so not timed | | | | | | {f['error']:.0e} | | "

    def cell(figure: str, form: Callable[[Any], str] = str) -> str:
        return form(f[figure]) if figure in f else ""

    speed = f"{f['ms']:.2f}" if "ms" in f else f"{f['tokens_per_second']:.0f}"
    cells = (
        name,
        speed,
        cell("spread", percent),
        cell("quiet"),
        cell("all", "{:.2f}".format),
        percent(limit / f["relative"]) if limit else "",
        f"{f['relative']:.2f}",
        cell("error", "{:.0e}".format),
        cell("loss", "{:.4f}".format),
        cell("agreement"),
    )
    return " | ".join(cells)


def cached(case: Case) -> float:
    """Numbers of keys and values that a token of a text reads, on average."""
    c = model_of(case.model).config
    return 2 * c.n_layer * c.n_embd * (case.prompt + (case.count - 1) / 2)  # the last token sees all others


def add_losses(case: Case, figures: Figures, right: Mapping[str, Peer]) -> str:
    """Add the loss of rounded weights; a sentence on that of fp32, or '' without a text or training."""
    if case.model in GPT2 or not corpus.INPUT.exists():
        return ""
    checkpoint = load(case.model)
    ids = checkpoint.tokenizer.encode(corpus.split(corpus.read(corpus.INPUT))[1])
    size = checkpoint.config.block_size  # windows share the token between them
    texts = [ids[at : at + size + 1] for at in range(0, min(LOSS_TOKENS, len(ids) - size), size)]
    for name, peer in right.items():
        if peer.rounded:
            figures[name]["loss"] = loss(peer.every_logits, texts)
    with torch.inference_mode():
        exact = loss(lambda ids: checkpoint.model(torch.tensor([ids]))[0], texts)
    return f"The loss of fp32 over {sum(len(ids) - 1 for ids in texts):,} tokens is {exact:.4f} nats\n\n"


def time_on_cpu(
    cases: Iterable[str], engines: Iterable[str], peers: Iterable[str], rounds: int
) -> dict[str, Any]:
    """Measure and print the cases; what --save keeps."""
    click.echo(f"{extension.describe('auto')}; PyTorch {torch.__version__}")
    clock = Cpu(SAMPLE_BYTES)  # from here: the compilers are done
    peaks = [machine.fma_peak()]
    results: dict[str, Figures] = {}
    for title in cases:
        case = CASES[title]
        click.echo(f"\n{title}: {case}\n")
        torch.set_num_threads(case.threads)
        figures, right = measure(case, on_cpu(case, engines, peers), rounds, clock)
        limit = None
        below = ""
        if case.batch == 1 and case.count > 1:
            needed = 4 * (model_of(case.model).config.num_params + cached(case))
            bandwidth = machine.read_bandwidth(int(needed))
            limit = case.count * needed / bandwidth
            below = add_losses(case, figures, right)
            below += f"A token needs {needed / 1e6:.2f} MB, read by one thread at {bandwidth / 1e9:.0f} GB/s"
        del right  # frees the contenders
        results[title] = finished(case, figures, limit)
        show(case, results[title])
        click.echo(f"\n{below}" if below else "")
    peaks.append(machine.fma_peak())
    facts = machine.describe() | {"simd_name": extension.load().simd_name()}
    busy = machine.busy(clock.load, peaks, 1)
    if busy:
        click.echo(busy)
    return {"machine": facts, "threads": 1, "busy": busy, "cases": results}


def limit_on_gpu(case: Case, dtype: str, gpu: Gpu) -> tuple[float, str]:
    """(seconds of a case that the GPU allows, the bound of it)."""
    params = model_of(case.model).config.num_params
    of_text = cached(case)
    steps, tokens = (case.count, case.batch) if case.count > 1 else (1, case.prompt)
    moved = Dtype(dtype).bytes * (params + case.batch * of_text)
    operations = 2 * tokens * (params + (of_text if case.count > 1 else of_text / 2))
    peak = gpu.fma_peak() if dtype == "fp32" else gpu.tensor_peak(Dtype.BF16)
    times = {"memory": moved / gpu.bandwidths()["read"], f"{dtype} products": operations / peak}
    bound = max(times, key=lambda name: times[name])
    what = f"a step moves {moved / 1e6:,.1f} MB and takes {operations / 1e9:,.2f} GFLOP: {bound}"
    return steps * times[bound], what


def time_on_gpu(
    cases: Iterable[str], dtypes: Iterable[str], engines: Iterable[str], peers: Iterable[str], rounds: int
) -> dict[str, Any]:
    """Measure and print the cases in each dtype; what --save keeps. Raises BuildError without a GPU."""
    gpu = Gpu()
    on = gpu.describe() | {"bandwidths": gpu.bandwidths()}
    click.echo(f"{on['name']}, PyTorch {torch.__version__}, CUDA {on['cuda']}")
    results: dict[str, Figures] = {}
    for title, dtype in itertools.product(cases, dtypes):
        case = CASES[title]
        click.echo(f"\n{title}, {dtype}: {case}\n")
        figures = measure(case, on_gpu(case, dtype, engines, peers), rounds, Cpu())[0]  # frees the contenders
        torch.cuda.empty_cache()
        limit, bound = limit_on_gpu(case, dtype, gpu)
        results[f"{title} {dtype}"] = finished(case, figures, limit)
        show(case, results[f"{title} {dtype}"])
        click.echo(f"\nLimit: {bound}")
    return {"machine": machine.describe() | {"gpu": on}, "cases": results}


@click.command(context_settings={"show_default": True})
@options.cpu_or_cuda
@options.names("--dtypes", "Formats of weights and cache on a GPU.", choices=DTYPES, default="fp32,bf16")
@options.names("--cases", "Cases to time.", choices=CASES, show_default=USUAL, default=None)
@options.names("--engines", "Our engines.", choices=ENGINES, show_default="all")
@options.names(
    "--peers", "Other engines.", choices=PEERS["cpu"] | PEERS["cuda"], show_default="all installed"
)
@options.integer("--rounds", "Rounds of each.", minimum=2, default=5)
@options.save("generation", "the figures")
def main(device, dtypes, cases, engines, peers, rounds, save) -> None:
    """Time text generation, our engines against others; print a Markdown table for each case."""
    torch.set_num_threads(1)
    engines = OURS[device] if engines is None else engines
    chosen = PEERS[device] if peers is None else peers
    try:
        if save:
            result_files.check_file(save)
        if device == "cuda":
            content = time_on_gpu(cases or ON_GPU, dtypes, engines, chosen, rounds)
        else:
            content = time_on_cpu(cases or ON_CPU, engines, chosen, rounds)
    except (ValueError, BuildError) as error:
        raise click.UsageError(str(error)) from None
    if save:
        result_files.write(content | {"format": FORMAT, "rounds": rounds}, Path(save))
    known = (figures for case in content["cases"].values() for figures in case.values())
    if content.get("busy") or any("error" in figures and "seconds" not in figures for figures in known):
        sys.exit(BUSY_EXIT_CODE if content.get("busy") else WRONG_EXIT_CODE)


if __name__ == "__main__":
    main()
