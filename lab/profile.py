"""gpt.py profile: where a token's time goes. Spans of an engine's work make a table.

The native engine records its spans itself (generation/csrc/). The PyTorch model gets hooks on its
modules, which are not changed.

attention: from queries, keys and values to the joined heads, including appending to the cache and changes of
layout.
projection, MLP down: the native engine's include the residual sums; PyTorch's sums are in `other`.
waiting: time in which the native engine's threads wait for each other; PyTorch's is inside its operators.
other: the time outside all spans: Python, the calls, waking the threads, reading the clock. Here each token
of one text is a separate call, so that each has its place; gpt.py --inference writes up to 256 tokens in a
call. Several texts are written in such calls here too.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from shakespeare.attention_ext.parts import helpers_of
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.native import Decoder
from shakespeare.generation.engines.pytorch import TorchEngine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.texts import slots_for
from shakespeare.generation.writer import Writer
from shakespeare.lab.machine import Load, busy_text
from shakespeare.lab.text import counted, markdown
from shakespeare.model.checkpoint import Checkpoint

KINDS = (
    *("embedding", "norm", "QKV", "attention", "projection", "MLP up", "MLP GELU", "MLP down"),
    *("head", "sampling", "draft", "waiting"),
)
DEFAULT_TOKENS = 200  # tokens to write if the block size allows it
REPETITIONS = 9  # repetitions with recording, and as many without; odd, so that one is the median
SEED = 1337


class Span(NamedTuple):
    """Work of a thread, from begin to end in nanoseconds of monotonic_ns(); thread 0 is the caller."""

    kind: str
    thread: int
    begin: int
    end: int


class Hooks:
    """The spans of a PyTorch engine by hooks on the model's modules, all in the calling thread."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine, self._choose = engine, engine.choose
        self._spans: list[Span] = []
        self._handles: list[Any] = []
        self._begun = 0

    def record(self, on: bool) -> None:
        """Switch recording on or off; initially off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._engine.choose = self._choose
        if not on:
            return
        self._engine.choose = self._timed_choice
        gpt = self._engine.model
        t: Any = gpt.transformer  # PyTorch does not type its modules
        self._between("embedding", t.wte.register_forward_pre_hook, t.drop.register_forward_hook)
        for block in t.h:
            qkv, projection, up, down = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
            self._around(norm=block.ln_1, QKV=qkv)
            self._between("attention", qkv.register_forward_hook, projection.register_forward_pre_hook)
            self._around(projection=projection, norm=block.ln_2, MLP_up=up)
            self._between("MLP GELU", up.register_forward_hook, down.register_forward_pre_hook)
            self._around(MLP_down=down)
        self._around(norm=t.ln_f, head=gpt.lm_head)

    def spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def _around(self, **modules: nn.Module) -> None:
        """Let a span last as long as a module's call; the modules are given by its kind."""
        for name, module in modules.items():
            kind = name.replace("_", " ")
            self._between(kind, module.register_forward_pre_hook, module.register_forward_hook)

    def _between(self, kind: str, register_begin: Callable, register_end: Callable) -> None:
        """Let a span last from one hook to another; each is given by the function that registers it.

        Hooks of one place are called in the order of registration: a span ends there before the next begins.
        """

        def begin(*_) -> None:
            self._begun = monotonic_ns()

        def end(*_) -> None:
            self._spans.append(Span(kind, 0, self._begun, monotonic_ns()))

        self._handles += [register_begin(begin), register_end(end)]

    def _timed_choice(self, *arguments) -> torch.Tensor:
        begin = monotonic_ns()
        tokens = self._choose(*arguments)
        self._spans.append(Span("sampling", 0, begin, monotonic_ns()))
        return tokens


def recorder(engine: Any) -> Any:
    """The recorder of an engine's spans, with record(on) and spans()."""
    return engine if engine.name == "native" else Hooks(engine)


@dataclass(frozen=True)
class Phase:
    """A prefill, or the tokens after it: calls (begin, end) and spans. threads: how many can have spans."""

    calls: list[tuple[int, int]]
    spans: list[Span]
    threads: int

    @property
    def seconds(self) -> float:
        """Wall time of the calls."""
        return 1e-9 * sum(end - begin for begin, end in self.calls)

    def shares(self) -> dict[str, float]:
        """The shares of the threads' time during the calls for each of KINDS and 'other'; their sum is 1.

        A helper's time without a span is waiting: for work, for the others, or for the next call.
        """
        wall = sum(end - begin for begin, end in self.calls)
        took = dict.fromkeys((*KINDS, "other"), 0)
        rest = [wall] * self.threads  # of each thread
        for kind, thread, begin, end in self.spans:
            took[kind] += end - begin
            rest[thread] -= end - begin
        took["other"] += rest[0]
        took["waiting"] += sum(rest[1:])
        return {kind: ns / (wall * self.threads) for kind, ns in took.items()}


def lengths(checkpoint: Checkpoint, prompt_tokens: int | None, tokens: int | None) -> tuple[int, int]:
    """The tokens of the prompt and of the text after it; ValueError if they are more than the block size.

    None: half of the block size for the prompt, then DEFAULT_TOKENS or the rest.
    """
    longest = checkpoint.config.block_size
    if prompt_tokens is None:
        prompt_tokens = max(1, longest // 2)
    if tokens is None:
        tokens = max(1, min(DEFAULT_TOKENS, longest - prompt_tokens))
    if not (prompt_tokens >= 1 and tokens >= 1 and prompt_tokens + tokens <= longest):
        must = f"together they must be at most block_size={longest}, and each at least 1"
        raise ValueError(f"prompt_tokens is {prompt_tokens} and tokens is {tokens}; {must}")
    return prompt_tokens, tokens


def run(
    checkpoint: Checkpoint,
    *,
    model: str,
    part: str = "part4",
    weights: str = "fp32",
    kv_cache: str = "fp32",
    prompt_tokens: int | None = None,
    tokens: int | None = None,
    texts: int = 1,
    **engine_options: Any,
) -> dict[str, Any]:
    """The figures() of the reading of a prompt and the writing of `tokens` tokens of each text after it.

    The prompt is the model's own text after token 0. The first token after it is not measured. part, weights,
    kv_cache, engine_options: as in EngineOptions. prompt_tokens, tokens: as in lengths(). texts: are written
    together. Raises TypeError or ValueError naming a wrong argument, BuildError.
    """
    prompt_tokens, tokens = lengths(checkpoint, prompt_tokens, tokens)
    precisions: dict[str, Any] = {"weights": weights, "kv_cache": kv_cache}
    capacity = prompt_tokens + tokens
    unbounded = EngineOptions.of({"kv_cache": kv_cache}, capacity=capacity, threads=2**31)
    most, _ = slots_for(2**31, checkpoint.config, unbounded)
    if not 1 <= texts <= most:
        raise ValueError(f"texts is {texts}; it must be from 1 to {most} with caches of {capacity} tokens")
    sized: dict[str, Any] = precisions | {"slots": texts, "capacity": capacity}
    engine = open_engine(checkpoint, part=part, **sized, **engine_options)
    simd = helpers_of(part, engine_options.get("simd", "auto"))
    about = {"model": model, "part": part, "engine": engine.name, "simd": simd}
    sizes = {"texts": texts, "prompt_tokens": prompt_tokens, "new_tokens": tokens, "repetitions": REPETITIONS}
    settings = about | precisions | {"threads": torch.get_num_threads()} | sizes
    if texts > 1 and isinstance(engine, Decoder):  # the table's steps have one token of each text
        engine.set_draft(None)
    load = Load()
    measured = figures(settings, *measure(engine, prompt_tokens, tokens))
    return measured | {"processors_taken_by_others": load.others()}


def measure(engine: Engine, prompt_tokens: int, tokens: int) -> tuple[Phase, Phase, list[float]]:
    """The prefill and the decoding, each repeated REPETITIONS times with spans and as often without.

    The phases are the repetitions with spans whose wall time is the median. Last, the median seconds without
    spans, of the prefill and of the decoding.
    """
    ids = _own_text(engine, prompt_tokens)
    spans_of = recorder(engine)
    phases: dict[bool, list[tuple[Phase, Phase]]] = {False: [], True: []}
    for repetition in range(-1, REPETITIONS):
        for recorded in (False, True) if repetition % 2 else (True, False):
            pair = _repetition(engine, spans_of, recorded, ids, tokens)
            if repetition >= 0:  # the first one warms up
                phases[recorded].append(pair)
    prefill, decode = (sorted(of, key=lambda phase: phase.seconds) for of in zip(*phases[True]))
    plain = [statistics.median(phase.seconds for phase in of) for of in zip(*phases[False])]
    return prefill[REPETITIONS // 2], decode[REPETITIONS // 2], plain


def _own_text(engine: Engine, prompt_tokens: int) -> list[int]:
    """The model's text after token 0, which is the first of these tokens."""
    writer, ids = _writer(engine, [0], 1), [0]
    while len(ids) < prompt_tokens:
        ids += [token for _, tokens in writer.step(1) for token in tokens]
    return ids


def _repetition(
    engine: Engine, spans_of: Any, recorded: bool, ids: Sequence[int], tokens: int
) -> tuple[Phase, Phase]:
    """One prefill, and the decoding of a text in each of the engine's slots after it."""
    threads = torch.get_num_threads() if engine.name == "native" else 1

    def phase(call: Callable[[int], int], left: int) -> Phase:
        """The calls that do `left` pieces of work; each is told how much is left, and returns what it did."""
        spans_of.record(recorded)
        calls = []
        while left:
            begin = monotonic_ns()
            left -= call(left)
            calls.append((begin, monotonic_ns()))
        spans_of.record(False)
        return Phase(calls, [Span(*span) for span in spans_of.spans()], threads)

    def read(left: int) -> int:
        engine.begin(0, ids)
        engine.read(0)
        return 1

    read(1)  # the first one after spans were taken has page faults again
    prefill = phase(read, 1)
    writer = _writer(engine, ids)
    writer.step(1)  # reads the prompt again
    return prefill, phase(lambda left: len(writer.step(left if engine.slots > 1 else 1)[0][1]), tokens)


def _writer(engine: Engine, ids: Sequence[int], texts: int | None = None) -> Writer:
    """A writer with texts that continue these tokens; None: as many as the engine has slots."""
    writer = Writer(engine)
    for i in range(texts or engine.slots):
        writer.join(Request(ids, seed=SEED + i))
    return writer


def figures(settings: dict[str, Any], prefill: Phase, decode: Phase, plain: Sequence[float]) -> dict:
    """The output of -o json: the settings, a row for each kind, and the cost of recording."""
    steps = settings["new_tokens"]
    tokens = steps * settings.get("texts", 1)

    def speeds(prefill: float, decode: float) -> dict[str, float]:
        us = {"decode_us_per_step": 1e6 * decode / steps, "decode_us_per_token": 1e6 * decode / tokens}
        return {"prefill_ms": 1e3 * prefill, **us, "tokens_per_second": tokens / decode}

    recorded = speeds(prefill.seconds, decode.seconds)
    rows = []
    for (kind, of_prefill), of_decode in zip(prefill.shares().items(), decode.shares().values()):
        ms = recorded["prefill_ms"] * of_prefill
        us = {name: recorded[name] * of_decode for name in ("decode_us_per_step", "decode_us_per_token")}
        of_kind = {"kind": kind, "prefill_ms": ms, "prefill_percent": 100 * of_prefill}
        rows.append(of_kind | us | {"decode_percent": 100 * of_decode})
    return settings | {"rows": rows, "recorded": recorded, "not_recorded": speeds(*plain)}


def table(f: dict[str, Any]) -> str:
    """The figures as a Markdown table, with the settings above it and the cost of recording below."""
    threads = counted(f["threads"], "thread")
    helpers = "" if f["simd"] is None else f", {f['simd']} helpers"
    several = f"{f['texts']} texts, " if f.get("texts", 1) > 1 else ""
    total = {"kind": "wall time", "prefill_percent": 100, "decode_percent": 100} | f["recorded"]
    rows = []
    for row in [*f["rows"], total]:
        ms, us = row["prefill_ms"], row["decode_us_per_token"]
        of_prefill = (f"{ms:.3f}", f"{row['prefill_percent']:.1f} %") if ms else ("", "")
        if ms or us:
            decode = (f"{row['decode_us_per_step']:.2f}", f"{us:.2f}") if several else (f"{us:.2f}",)
            rows.append((row["kind"], *of_prefill, *decode, f"{row['decode_percent']:.1f} %"))
    columns = ("decode, µs per step", "µs per token") if several else ("decode, µs per token",)
    lines = [
        f"{f['model']}: {f['part']}{helpers}, {f['engine']} engine, weights in {f['weights']}, "
        f"cache in {f['kv_cache']}, {threads}; "
        f"{several}a prompt of {f['prompt_tokens']} tokens, then {f['new_tokens']} more",
        "",
        markdown(("", "prefill, ms", "share", *columns, "share"), rows),
        "",
    ]
    if f["threads"] > 1 and f["engine"] == "native":
        lines.append(f"Rows are the means of {threads}, so they add up to the wall time.")
    for name, of in (("Recording", f["recorded"]), ("Not recording", f["not_recorded"])):
        us, rate = f"{of['decode_us_per_token']:.2f} µs per token", f"{of['tokens_per_second']:,.0f} tokens/s"
        lines.append(f"{name}: {of['prefill_ms']:.3f} ms, {us}, {rate}")
    lines.append(f"Medians of {REPETITIONS} repetitions of each, in turn")
    return "\n".join(lines + busy_text(f["processors_taken_by_others"], f["threads"]))
