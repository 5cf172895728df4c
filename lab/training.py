"""Training steps in the lab: the native one beside PyTorch's, and where the time of each goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from attention_ext.parts import check_part, with_gradient
from lab.machine import BUSY_SHARE, Load
from model.gpt import GPTConfig
from training.native import KINDS, part4
from training.recipe import Recipe
from training.trainer import Trainer

SHAKES = GPTConfig(block_size=128, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False)  # shakes128's
CHARACTERS = 2048  # characters of a batch by default
TOLERANCE = 1e-4  # tolerance as a share of the largest gradient of a parameter
SHOWN = 12  # PyTorch's operators in the table
SECONDS = 2.0  # time of a profile
LEAST_STEPS, MOST_STEPS = 5, 100


def trainer(part: str, config: GPTConfig, batch: int, simd: str = "auto") -> Trainer:
    """A trainer of a model of these sizes, without dropout and biases, on random tokens.

    part: 'part0' for the step in PyTorch, 'part4' for the native one.
    Raises ValueError for a part without a gradient.
    """
    if check_part(part).name not in with_gradient():
        raise ValueError(f"part is {part!r}; it must be one with a gradient: {', '.join(with_gradient())}")
    recipe = Recipe(
        block_size=config.block_size,
        steps=1,
        dropout=0.0,
        batch_chars=batch * config.block_size,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (10 * config.block_size + 10_000,), generator=generator)
    attend = None if part == "part0" else part4(simd)
    return Trainer(recipe, config.vocab_size, ids, torch.device("cpu"), attend)


def operations(config: GPTConfig, batch: int) -> int:
    """Floating-point operations of a step's forward and backward products, without the optimizers'.

    6 for each weight of a matrix and each token, and seven products of 2 d for each pair of a query and a
    key.
    """
    C, T, tokens = config.n_embd, config.block_size, batch * config.block_size
    weights = config.n_layer * 12 * C * C + config.vocab_size * C
    pairs = batch * config.n_layer * T * (T + 1) // 2
    return 6 * weights * tokens + 7 * 2 * C * pairs


def largest_error(pytorchs: Trainer, native: Trainer) -> tuple[str, float]:
    """The parameter whose gradients differ most, and the difference over its largest gradient; one batch."""
    T, tokens = pytorchs.recipe.block_size, pytorchs.recipe.batch_chars
    window = pytorchs.ids[torch.arange(tokens // T)[:, None] * 7 + torch.arange(T + 1)]
    for each in (pytorchs, native):
        each._gradients(window[:, :-1], window[:, 1:])
    named = zip(pytorchs.model.named_parameters(), native.model.parameters())
    errors = {name: _error(p.grad, q.grad) for (name, p), q in named}
    return max(errors.items(), key=lambda item: item[1])


def _error(right: torch.Tensor | None, got: torch.Tensor | None) -> float:
    """The largest difference over the largest gradient; infinite if one is missing or not finite."""
    if right is None or got is None or not bool(got.isfinite().all()):
        return float("inf")
    return float((right - got).abs().max() / right.abs().max())


@dataclass(frozen=True)
class Profile:
    """The time of a step: its seconds, and those of each kind of work, the mean of all threads.

    plain: the median step without PyTorch's profiler. others: processors that other programs took, if known.
    """

    part: str
    config: GPTConfig
    batch: int
    threads: int
    steps: int
    seconds: float
    kinds: dict[str, float]
    plain: float
    others: float | None


def profile(part: str, config: GPTConfig, batch: int | None = None, simd: str = "auto") -> Profile:
    """Profile training steps of a model of these sizes; for arguments and errors see trainer().

    The native step always measures itself; its profile is that of the median step. PyTorch's is the mean of
    the steps that its profiler recorded, which costs time.
    """
    batch = max(1, CHARACTERS // config.block_size) if batch is None else batch
    of = trainer(part, config, batch, simd)
    first, load = seconds_of(of.step), Load()
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(SECONDS / max(first, seconds_of(of.step)))))
    plain = statistics.median(seconds_of(of.step) for _ in range(steps))
    seconds, kinds = (_native if of.native else _pytorchs)(of, steps)
    kinds["other"] = seconds - sum(kinds.values())
    return Profile(part, config, batch, torch.get_num_threads(), steps, seconds, kinds, plain, load.others())


def seconds_of(function: Callable[[], None]) -> float:
    """The seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _native(of: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    measured = []
    for _ in range(steps):
        of.native_step.seconds.zero_()
        seconds = seconds_of(of.step)
        measured.append((seconds, (of.native_step.seconds / torch.get_num_threads()).tolist()))
    seconds, spent = sorted(measured)[steps // 2]
    return seconds, dict(zip(KINDS, spent))


def _pytorchs(of: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    with profiler(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        seconds = sum(seconds_of(of.step) for _ in range(steps)) / steps
    spent = {event.key: 1e-6 * event.self_cpu_time_total / steps for event in recorded.key_averages()}
    largest = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    rest = sum(of_one for name, of_one in spent.items() if name not in largest)
    return seconds, {name: spent[name] for name in largest} | {"other operators": rest}


def table(p: Profile) -> str:
    """A profile as a Markdown table."""
    c = p.config
    rate = operations(c, p.batch) / p.plain
    lines = [
        f"a training step with {p.part}, {'PyTorch' if p.part == 'part0' else 'native'}: batch {p.batch}, "
        f"block {c.block_size}, {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, {c.vocab_size} "
        f"characters; {p.threads} thread{'s' * (p.threads > 1)}, {p.steps} steps",
        "",
        "| | ms | share |",
        "|---|---|---|",
    ]
    for kind, seconds in p.kinds.items():
        lines.append(f"| {kind} | {1e3 * seconds:.2f} | {seconds / p.seconds:.1%} |")
    lines.append(f"| step | {1e3 * p.seconds:.2f} | 100.0% |\n")
    if p.threads > 1 and p.part != "part0":
        lines.append(f"Rows are the means of {p.threads} threads, so they add up to the step.")
    lines.append(f"Not profiled: {1e3 * p.plain:.2f} ms, {rate / 1e9:.0f} GFLOP/s without the optimizers'")
    if p.others is not None and p.others > BUSY_SHARE * p.threads:
        lines.append(f"The machine was busy: others took {p.others:.2f} processors on average.")
    return "\n".join(lines)


def figures(p: Profile) -> dict:
    """The output of -o json."""
    c = p.config
    return {
        "part": p.part,
        "batch": p.batch,
        "block_size": c.block_size,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.n_embd,
        "vocab_size": c.vocab_size,
        "threads": p.threads,
        "steps": p.steps,
        "rows": [{"kind": kind, "ms": 1e3 * seconds} for kind, seconds in p.kinds.items()],
        "step_ms": 1e3 * p.seconds,
        "not_profiled_ms": 1e3 * p.plain,
        "processors_taken_by_others": p.others,
    }
