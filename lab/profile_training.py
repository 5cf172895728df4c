"""gpt.py profile --train: where the time of a training step goes, in C++ or in PyTorch."""

import statistics
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from shakespeare.attention_ext.parts import check_compatible
from shakespeare.lab.machine import Load, busy_text
from shakespeare.lab.text import counted, markdown
from shakespeare.lab.timing import Clock
from shakespeare.model.config import GPTConfig
from shakespeare.training.recipe import Recipe
from shakespeare.training.trainer import Trainer

CHARACTERS = 2048  # characters of a batch by default
SHOWN = 12  # PyTorch's operators in the table
SECONDS = 2.0  # time of a profile
LEAST_STEPS, MOST_STEPS = 5, 100
SIZES = ("block_size", "n_layer", "n_head", "n_embd")  # of GPTConfig and Recipe


def trainer(part: str, config: GPTConfig, batch: int, simd: str = "auto") -> Trainer:
    """A trainer on random tokens, in PyTorch (part0) or native (part4). Raises ValueError for other parts."""
    check_compatible(part, gradient=True)
    sizes: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
    recipe = Recipe(steps=1, dropout=0.0, batch_chars=batch * config.block_size, **sizes)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (10 * config.block_size + 10_000,), generator=generator)
    return Trainer(recipe, config.vocab_size, ids, torch.device("cpu"), part, simd)


def operations(config: GPTConfig, batch: int) -> int:
    """Floating-point operations of a step's forward and backward products, without the optimizers'.

    6 for each weight of a matrix and each token, and seven products of 2 d for each query and key.
    """
    C, T, tokens = config.n_embd, config.block_size, batch * config.block_size
    weights = config.n_layer * 12 * C * C + config.vocab_size * C
    pairs = batch * config.n_layer * T * (T + 1) // 2
    return 6 * weights * tokens + 7 * 2 * C * pairs


def profile(part: str, config: GPTConfig, batch: int | None = None, simd: str = "auto") -> dict:
    """Profile training steps of a model of these sizes; for arguments and errors see trainer().

    rows: the time of each kind of work, the mean of all threads; their sum is step_ms. not_profiled_ms: the
    median step without PyTorch's profiler. processors_taken_by_others: None if unknown.
    The native step always measures itself; its profile is that of the median step. PyTorch's is the mean of
    the steps that its profiler recorded, which costs time.
    """
    batch = max(1, CHARACTERS // config.block_size) if batch is None else batch
    of = trainer(part, config, batch, simd)
    load, clock = Load(), Clock()
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(SECONDS / max(clock.time(of.step, 2)))))
    plain = statistics.median(clock.time(of.step, steps))
    seconds, kinds = (_native if of.native else _pytorchs)(of, steps)
    kinds["other"] = seconds - sum(kinds.values())
    about: dict = {"part": part, "batch": batch}
    about |= {name: getattr(config, name) for name in (*SIZES, "vocab_size")}
    about |= {"threads": torch.get_num_threads(), "steps": steps}
    about["rows"] = [{"kind": kind, "ms": 1e3 * spent} for kind, spent in kinds.items()]
    about |= {"step_ms": 1e3 * seconds, "not_profiled_ms": 1e3 * plain}
    about["gflops"] = operations(config, batch) / plain / 1e9
    return about | {"processors_taken_by_others": load.others()}


def _native(of: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    measured = []
    for _ in range(steps):
        of.native.take_seconds()
        (seconds,) = Clock().time(of.step, 1)
        measured.append((seconds, of.native.take_seconds()))
    seconds, spent = sorted(measured, key=lambda step: step[0])[steps // 2]
    order = sorted(spent, key=lambda kind: (kind == "waiting", -spent[kind]))  # the largest first
    return seconds, {kind: spent[kind] / torch.get_num_threads() for kind in order}


def _pytorchs(of: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    with profiler(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        seconds = statistics.mean(Clock().time(of.step, steps))
    spent = {event.key: 1e-6 * event.self_cpu_time_total / steps for event in recorded.key_averages()}
    largest = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    rest = sum(of_one for name, of_one in spent.items() if name not in largest)
    return seconds, {name: spent[name] for name in largest} | {"other operators": rest}


def table(f: dict[str, Any]) -> str:
    """A profile as a Markdown table."""
    ms, threads = f["step_ms"], f["threads"]
    rows = [(row["kind"], f"{row['ms']:.2f}", f"{row['ms'] / ms:.1%}") for row in f["rows"]]
    lines = [
        f"a training step with {f['part']}, {'PyTorch' if f['part'] == 'part0' else 'native'}: batch "
        f"{f['batch']}, block {f['block_size']}, {f['n_layer']} layers, {f['n_head']} heads, width "
        f"{f['n_embd']}, {f['vocab_size']} characters; {counted(threads, 'thread')}, {f['steps']} steps",
        "",
        markdown(("", "ms", "share"), [*rows, ("step", f"{ms:.2f}", "100.0%")]),
        "",
    ]
    if threads > 1 and f["part"] != "part0":
        lines.append(f"Rows are the means of {threads} threads, so they add up to the step.")
    plain = f"Not profiled: {f['not_profiled_ms']:.2f} ms"
    lines.append(f"{plain}, {f['gflops']:.0f} GFLOP/s without the optimizers'")
    return "\n".join(lines + busy_text(f["processors_taken_by_others"], threads))
