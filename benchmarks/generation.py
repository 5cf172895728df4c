"""Generating text against other engines on the same weights: verified, interleaved, medians.

    python benchmarks/generation.py [--cases batch1,long] [--threads 1] [--peers CTranslate2]

Before it is timed, each contender's logits are held against float64, and its greedy text against that of
our PyTorch engine: where two tokens are level either may come, so the text is only reported. Times are of
whole texts, with the prompt and each engine's Python loop. With one thread all run in this process. With
several each has a process of its own, as idle threads of one engine would disturb the others; these stay
alive, and still take turns, with a pause and a text that does not count before each, as threads that have
slept need some milliseconds until each is on a core of its own.

The memory limit is what one thread reads in order and again and again, measured in the same run on as many
bytes as a token needs: all weights but the position table, and the keys and values so far.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path[:0] = [str(directory) for directory in Path(__file__).resolve().parents[:2]]

from peers import PEERS  # noqa: E402

from attention_ext import PARTS, extension  # noqa: E402
from generation.engine import ENGINES, open_engine  # noqa: E402
from generation.generate import Writer  # noqa: E402
from generation.sampling import Sampling  # noqa: E402
from lab.machine import Load, end, fma_peak, read_bandwidth  # noqa: E402
from model import load  # noqa: E402
from model.gpt import GPT  # noqa: E402

TOLERANCE = 1e-3  # of logits: what is off by more is wrong, not slow
LOOSE = 1e-2  # llama.cpp's: its GELU is the tanh approximation in half precision
ROUNDED = 1e-1  # of weights in bfloat16, whose error is there to be seen; tests hold it to its model
LEAST = 0.05  # seconds that one measurement takes
SAMPLED = 4 << 20  # bytes, as many as a token of the first case reads
PAUSE = 0.3  # seconds in which idle threads of another process fall asleep
Call = Callable[..., tuple[float, Any]]  # seconds and result, a list, of the Peer's method that is named


@dataclass(frozen=True)
class Case:
    """What is timed: `count` tokens after a prompt of `prompt`, in each of `batch` texts."""

    model: str
    batch: int
    prompt: int
    count: int
    slow_without_cache: bool = False  # longer than some 20 s


CASES = {
    "batch1": Case("shakes256", 1, 1, 255),
    "batch32": Case("shakes256", 32, 1, 255, slow_without_cache=True),
    "long": Case("shakes2048", 1, 1, 2047, slow_without_cache=True),
    "prefill": Case("shakes2048", 1, 1024, 1),
}


class Own:
    """One of our engines as a peer, driven by model.generate.Writer as gpt.py does."""

    def __init__(self, model: GPT, name: str, slots: int) -> None:
        engine, part, *weights = name.split()
        self.name = name
        self.engine = open_engine(model, engine, part=part, weights=(weights or ["fp32"])[0], slots=slots)

    def logits(self, ids: list[int]) -> Tensor:
        self.engine.prefill(0, ids)
        return self.engine.logits(0)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        texts = range(len(prompts))  # of equal prompts
        writer = Writer(self.engine, prompts[0], texts, Sampling(temperature=0))
        steps: list[list[int]] = []
        while len(steps) < count:
            steps += writer.write(texts, count - len(steps))
        return [list(text) for text in zip(*steps)]

    def prefill(self, ids: list[int]) -> None:
        self.greedy(ids, 1)


def local(key: str, case: str, threads: int) -> tuple[str, Call]:
    """Name and call of a contender in this process; the name is empty where it is not installed."""
    torch.set_num_threads(threads)
    model = load(CASES[case].model).model
    try:
        peer = PEERS[key](model, threads) if key in PEERS else Own(model, key, CASES[case].batch)
    except ImportError:
        return "", lambda: (0.0, None)

    def call(method: str, *arguments: Any) -> tuple[float, Any]:
        start = time.perf_counter()
        result = getattr(peer, method)(*arguments)
        seconds = time.perf_counter() - start
        return seconds, result.tolist() if isinstance(result, Tensor) else result

    return peer.name, call


def remote(key: str, case: str, threads: int, stack: ExitStack) -> tuple[str, Call]:
    """The same in a process of its own, which lives until the stack is closed."""
    pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

    def call(*task: Any) -> tuple[float, Any]:
        return pool.submit(answer, key, case, threads, *task).result()

    return pool.submit(answer, key, case, threads).result(), call


opened = cache(local)


def answer(key: str, case: str, threads: int, *task: Any) -> Any:
    """Do in its process what remote() is asked: a call, or to tell its name."""
    name, call = opened(key, case, threads)
    return call(*task) if task else name


def exact_logits(model: GPT, ids: list[int]) -> Tensor:
    """Logits (V,) after `ids` in float64."""
    exact = GPT(model.config, partial(F.scaled_dot_product_attention, is_causal=True)).double().eval()
    exact.load_state_dict(model.state_dict())
    with torch.inference_mode():
        return exact(torch.tensor([ids]), last_only=True)[0, -1]


def bytes_per_token(model: GPT, case: Case) -> float:
    """What one token of a single text must read: weights, and K and V of the context, on average."""
    context = case.prompt + (case.count - 1) / 2  # the last token sees all others
    return 4 * model.num_params() + 4 * 2 * model.config.n_layer * model.config.n_embd * context


def agreement(texts: list[list[int]], expected: list[int]) -> int:
    """How many tokens of the least like text are as expected before the first that is not."""
    return min(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(t, expected))) for t in texts)


def tolerance(name: str) -> float:
    """How far a contender's logits may be off."""
    return LOOSE if name.startswith("llama.cpp") else ROUNDED if name.endswith("bf16") else TOLERANCE


def run_case(title: str, calls: dict[str, Call], rounds: int, watch: Load, apart: bool) -> None:
    """Verify, time and print one case, taking the contenders in turn; apart: each has its process."""
    case = CASES[title]
    model, batch, count = load(case.model).model, case.batch, case.count
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(100, case.prompt),)).tolist()
    exact = exact_logits(model, ids)
    prompt = ids if case.prompt > 1 else [0]  # a line end
    task: tuple[Any, ...] = ("greedy", prompt, count) if count > 1 else ("prefill", prompt)
    if batch > 1:
        task = ("greedy_batch", [prompt] * batch, count)
    expected = Own(model, "torch part4", 1).greedy(prompt, count)
    errors, texts, repeats = {}, {}, {}
    for name, call in calls.items():
        errors[name] = float((torch.tensor(call("logits", ids)[1]) - exact).abs().max())
        if errors[name] <= tolerance(name):
            first, result = call(*task)
            repeats[name] = max(1, round(LEAST / first))
            written = result if batch > 1 else [result]
            texts[name] = f"{agreement(written, expected)} of {count}" if count > 1 else ""
            if batch > 1 and (same := agreement(written, call("greedy", prompt, count)[1])) < count:
                texts[name] += f", {same} as when alone"
    seconds: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(rounds):
        for name, times in seconds.items():
            if apart:
                time.sleep(PAUSE)
                calls[name](*task)
            times.append(sum(calls[name](*task)[0] for _ in range(repeats[name])) / repeats[name])
            watch.sample(SAMPLED)
    needed = bytes_per_token(model, case)
    bandwidth = read_bandwidth(int(needed)) if batch == 1 < count else 0.0
    click.echo(f"\n{title}: {case.model}, {case.prompt} + {count} tokens, batch {batch}\n")
    table(case, seconds, errors, texts, count * needed / bandwidth if bandwidth else None)
    if bandwidth:
        click.echo(f"\nA token needs {needed / 1e6:.2f} MB, read by one thread at {bandwidth / 1e9:.0f} GB/s")


def table(
    case: Case,
    seconds: dict[str, list[float]],
    errors: dict[str, float],
    texts: dict[str, str],
    limit: float | None,
) -> None:
    """Print the figures; limit, in seconds, is the memory's. The first contender that was timed is 1."""
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    one, unit = next(iter(middle), "none"), "tokens/s" if case.count > 1 else "ms"
    click.echo(f"| contender | {unit} | spread | of memory limit | {one} = 1 | logit error | greedy text |")
    click.echo("|---" * 7 + "|")
    for name, error in errors.items():
        if name not in seconds:
            click.echo(f"| {name} | wrong, so not timed | | | | {error:.0e} | |")
            continue
        time, (low, _, high) = middle[name], statistics.quantiles(seconds[name], n=4)
        figure = f"{case.batch * case.count / time:.0f}" if case.count > 1 else f"{1e3 * time:.2f}"
        share = f"{100 * limit / time:.0f} %" if limit else ""
        click.echo(
            f"| {name} | {figure} | {100 * (high - low) / time:.0f} % | {share} "
            f"| {time / middle[one]:.2f} | {error:.0e} | {texts[name]} |"
        )
    if limit and middle:
        click.echo(f"| memory limit | {case.count / limit:.0f} | | 100 % | {limit / middle[one]:.2f} | | |")


@click.command()
@click.option("--cases", default=",".join(CASES), show_default=True, help="Cases to time.")
@click.option("--engines", default=",".join(ENGINES), show_default=True, help="Our engines that take part.")
@click.option("--parts", default="part4", show_default=True, help="Parts that take part, in each engine.")
@click.option("--peers", "others", default=",".join(PEERS), help="Other engines.  [default: all installed]")
@click.option("--bf16/--no-bf16", default=True, help="Time the native engine with bfloat16 too.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of each.")
@click.option("--rounds", type=click.IntRange(2), default=5, show_default=True, help="Times each is timed.")
@click.option("--slow/--no-slow", help="Include what takes longer than some 20 s.  [default: no-slow]")
def main(
    cases: str, engines: str, parts: str, others: str, bf16: bool, threads: int, rounds: int, slow: bool
) -> None:
    """Time the writing of text, ours against other engines; prints a Markdown table for each case."""
    torch.set_num_threads(threads)
    chosen = [[name for name in text.split(",") if name] for text in (cases, engines, parts, others)]
    for names, allowed in zip(chosen, map(list[str], (CASES, ENGINES, PARTS, PEERS))):
        if wrong := [name for name in names if name not in allowed]:
            raise click.UsageError(f"{wrong[0]!r} must be one of {', '.join(allowed)}")
    keys = [f"{e} {p}" for p in chosen[2] for e in chosen[1] if e == "torch" or PARTS[p].operator]
    keys += [f"{key} bf16" for key in keys if bf16 and key.startswith("native")] + chosen[3]
    click.echo(f"{extension.describe('auto')}; PyTorch {torch.__version__}")
    watch = Load()  # from here: the compilers are done
    peaks = [fma_peak("auto")]
    for name in chosen[0]:
        calls: dict[str, Call] = {}
        with ExitStack() as stack:
            for key in list(keys):
                if key == "UncachedPyTorch" and CASES[name].slow_without_cache and not slow:
                    click.echo(f"\n{name}: {key} is slow and left out; --slow includes it")
                    continue
                shown, call = remote(key, name, threads, stack) if threads > 1 else local(key, name, threads)
                if shown:
                    calls[shown] = call
                else:
                    keys.remove(key)
                    click.echo(f"{key} is not installed")
            run_case(name, calls, rounds, watch, threads > 1)
    peaks.append(fma_peak("auto"))
    end(watch, peaks, threads)


if __name__ == "__main__":
    main()
