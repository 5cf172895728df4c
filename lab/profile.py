"""gpt.py profile: where a token's time goes. Spans of an engine's work make a table and a trace.

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

import json
import statistics
from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from shakespeare.attention_ext.parts import helpers_of
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.native import Decoder, DraftCounts
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
PROCESS = 1  # the process's number in a trace


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

    def _timed_choice(self, *arguments) -> list[int]:
        begin = monotonic_ns()
        tokens = self._choose(*arguments)
        self._spans.append(Span("sampling", 0, begin, monotonic_ns()))
        return tokens


def recorder(engine: Any) -> Any:
    """The recorder of an engine's spans, with record(on) and spans()."""
    return engine if engine.name == "native" else Hooks(engine)


@dataclass(frozen=True)
class Phase:
    """A prefill, or the tokens after it: the calls, as (begin, end) in order, and the spans inside them.

    threads: the number of threads that could have spans.
    """

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


def run(
    checkpoint: Checkpoint,
    *,
    model: str,
    part: str = "part4",
    simd: str = "auto",
    weights: str = "fp32",
    kv_cache: str = "fp32",
    prompt_tokens: int | None = None,
    tokens: int | None = None,
    texts: int = 1,
    trace_file: Path | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The figures() of the reading of a prompt and the writing of `tokens` tokens of each text after it.

    The prompt is the model's own text after token 0. The first token after it needs no reading and is not
    measured. Each later token is measured with the reading of the token before it.

    model: the model's name, for the output. part, simd, weights, kv_cache, others: as in
    EngineOptions.
    prompt_tokens: by default half of the block size. tokens: by default DEFAULT_TOKENS, at most the rest of
    the block size. texts: are written together, after the same prompt. trace_file: the trace is written to it
    as JSON.
    Raises TypeError or ValueError naming a wrong argument, OSError if trace_file cannot be written, and
    BuildError if the kernels cannot be compiled.
    """
    longest = checkpoint.config.block_size
    if prompt_tokens is None:
        prompt_tokens = max(1, longest // 2)
    if tokens is None:
        tokens = max(1, min(DEFAULT_TOKENS, longest - prompt_tokens))
    if not (prompt_tokens >= 1 and tokens >= 1 and prompt_tokens + tokens <= longest):
        raise ValueError(
            f"prompt_tokens is {prompt_tokens} and tokens is {tokens}; "
            f"together they must be at most block_size={longest}, and each at least 1"
        )
    precisions: dict[str, Any] = {"weights": weights, "kv_cache": kv_cache}
    capacity = prompt_tokens + tokens
    unbounded = EngineOptions.of({"kv_cache": kv_cache}, capacity=capacity, threads=2**31)
    most, _ = slots_for(2**31, checkpoint.config, unbounded)
    if not 1 <= texts <= most:
        raise ValueError(f"texts is {texts}; it must be from 1 to {most} with caches of {capacity} tokens")
    sized: dict[str, Any] = precisions | {"slots": texts, "capacity": capacity}
    engine = open_engine(checkpoint, part=part, simd=simd, **sized, **others)
    about = {"model": model, "part": part, "engine": engine.name, "simd": helpers_of(part, simd)}
    sizes = {"texts": texts, "prompt_tokens": prompt_tokens, "new_tokens": tokens, "repetitions": REPETITIONS}
    settings = about | precisions | {"threads": torch.get_num_threads()} | sizes
    with open(trace_file, "w") if trace_file else nullcontext() as file:  # before it takes time
        load = Load()
        drafts = measure_drafts(engine, prompt_tokens, tokens)
        if drafts and texts > 1:  # the table's steps have one token of each text
            cast(Decoder, engine).set_draft(None)
        prefill, decode, plain = measure(engine, prompt_tokens, tokens)
        if file:
            json.dump(trace(settings, prefill, decode), file)
    found = figures(settings, prefill, decode, plain) | {"drafts": drafts}
    return found | {"processors_taken_by_others": load.others()}


def measure(engine: Engine, prompt_tokens: int, tokens: int) -> tuple[Phase, Phase, list[float]]:
    """The prefill and the decoding, each repeated REPETITIONS times with spans and as often without.

    The phases are the repetitions with spans whose wall time is the median. Last, the median seconds without
    spans, of the prefill and of the decoding.
    """
    ids = _own_text(engine, prompt_tokens)
    spans_of = recorder(engine)
    phases: dict[bool, list[tuple[Phase, Phase]]] = {False: [], True: []}
    for repetition in range(-1, REPETITIONS):
        order = (False, True) if repetition % 2 else (True, False)
        for recorded in order:
            pair = _repetition(engine, spans_of, recorded, ids, tokens)
            if repetition >= 0:  # the first one warms up
                phases[recorded].append(pair)
    prefill, decode = (sorted(of, key=lambda phase: phase.seconds) for of in zip(*phases[True]))
    plain = [statistics.median(phase.seconds for phase in of) for of in zip(*phases[False])]
    return prefill[REPETITIONS // 2], decode[REPETITIONS // 2], plain


def measure_drafts(engine: Engine, prompt_tokens: int, tokens: int) -> dict[str, float] | None:
    """The same writing in calls as long as gpt.py --inference makes, with and without the engine's draft.

    None without a draft, or with more texts than a draft serves. The times of a token are medians; those of
    a step are means of all steps: guessing, the verification of guesses, and what of it the rows cost that
    gave no token.
    """
    if getattr(engine, "draft", None) is None:
        return None
    decoder = cast(Decoder, engine)
    draft, ids = decoder.draft, _own_text(engine, prompt_tokens)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counts = []
    for repetition in range(-1, REPETITIONS):
        for on in (False, True) if repetition % 2 else (True, False):
            decoder.set_draft(draft if on else None)
            decoder.draft_counts()
            writer = _writer(engine, ids)
            writer.step(1)
            begin = monotonic_ns()
            left = tokens
            while left:
                left -= len(writer.step(left)[0][1])
            took, count = 1e-9 * (monotonic_ns() - begin), decoder.draft_counts()
            if on and not count.steps:
                return None
            if repetition >= 0:
                seconds[on].append(took)
                counts += [count] if on else []
    decoder.set_draft(draft)
    done = {name: sum(getattr(each, name) for each in counts) for name in DraftCounts._fields}
    steps = max(1, done["steps"])
    return {
        "off_us_per_token": 1e6 * statistics.median(seconds[False]) / tokens / engine.slots,
        "on_us_per_token": 1e6 * statistics.median(seconds[True]) / tokens / engine.slots,
        "hits_percent": 100 * done["hits"] / max(1, done["guesses"]),
        "tokens_per_step": done["tokens"] / steps,
        "drafted_per_step": done["drafted"] / steps,
        "accepted_percent": 100 * done["accepted"] / max(1, done["drafted"]),
        "guessing_us_per_step": 1e6 * done["guessing"] / steps,
        "verifying_us_per_step": 1e6 * done["verifying"] / steps,
        "wasted_us_per_step": 1e6 * done["wasted"] / steps,
    }


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
        return {
            "prefill_ms": 1e3 * prefill,
            "decode_us_per_step": 1e6 * decode / steps,
            "decode_us_per_token": 1e6 * decode / tokens,
            "tokens_per_second": tokens / decode,
        }

    recorded = speeds(prefill.seconds, decode.seconds)
    rows = [
        {
            "kind": kind,
            "prefill_ms": recorded["prefill_ms"] * of_prefill,
            "prefill_percent": 100 * of_prefill,
            "decode_us_per_step": recorded["decode_us_per_step"] * of_decode,
            "decode_us_per_token": recorded["decode_us_per_token"] * of_decode,
            "decode_percent": 100 * of_decode,
        }
        for (kind, of_prefill), of_decode in zip(prefill.shares().items(), decode.shares().values())
    ]
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
        lines.append(
            f"{name}: {of['prefill_ms']:.3f} ms, {of['decode_us_per_token']:.2f} µs per token, "
            f"{of['tokens_per_second']:,.0f} tokens/s"
        )
    lines.append(f"Medians of {REPETITIONS} repetitions of each, in turn")
    if drafts := f.get("drafts"):
        lines += [
            "",
            f"With drafts: {drafts['on_us_per_token']:.2f} µs per token, without: "
            f"{drafts['off_us_per_token']:.2f}. {drafts['hits_percent']:.0f} % of the guesses hit.",
            f"A step has {drafts['drafted_per_step']:.2f} guesses, {drafts['accepted_percent']:.0f} % of "
            f"them are accepted, and it gives {drafts['tokens_per_step']:.2f} tokens.",
            f"Of a step, guessing takes {drafts['guessing_us_per_step']:.2f} µs, and the verification "
            f"{drafts['verifying_us_per_step']:.2f} µs.",
            f"Rows that are thrown away take {drafts['wasted_us_per_step']:.2f} µs of it.",
        ]
    return "\n".join(lines + busy_text(f["processors_taken_by_others"], f["threads"]))


def trace(settings: dict[str, Any], prefill: Phase, decode: Phase) -> dict:
    """A trace for ui.perfetto.dev and chrome://tracing, in microseconds from the beginning of the prefill.

    Prefill and decoding come from two repetitions, so the tokens are shifted to the end of the prefill. A
    token's name is its number, from 0; its position is that of the token that it reads. With several texts a
    call of the engine is named instead, because it writes several tokens of each. The calling thread
    has the number of the process, PROCESS, which makes it the main thread; the helpers have the next numbers.
    There is no thread 0: Perfetto would merge its spans with those of the main thread.
    """
    begin, end = prefill.calls[0]
    prompt, tokens = settings["prompt_tokens"], range(settings["new_tokens"])
    calls: list[tuple[str, dict]] = [(f"token {i}", {"position": prompt + i}) for i in tokens]
    if settings.get("texts", 1) > 1:
        calls = [(f"call {i}", {}) for i in range(len(decode.calls))]
    spans = _events(prefill, begin, [("prefill", {"tokens": prompt})])
    spans += _events(decode, decode.calls[0][0] - (end - begin), calls)
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))  # a call before its spans
    names = [("process_name", 0, f"{settings['model']} {settings['part']}, {settings['engine']} engine")]
    for i in range(decode.threads):
        names.append(("thread_name", i, f"helper {i}" if i else "calling thread"))
    events = [
        {"name": name, "ph": "M", "ts": 0, "pid": PROCESS, "tid": PROCESS + thread, "args": {"name": value}}
        for name, thread, value in names
    ]
    return {"traceEvents": events + spans, "displayTimeUnit": "ns", "otherData": settings}


def _events(phase: Phase, zero: int, named: Sequence[tuple[str, dict]]) -> list[dict]:
    """The calls of a phase, each with its name and arguments, and its spans. Times start at `zero`."""
    begins = [begin for begin, _ in phase.calls]
    calls = [(Span(name, 0, *call), args) for call, (name, args) in zip(phase.calls, named)]
    spans = [(span, named[bisect(begins, span.begin) - 1][1]) for span in phase.spans]
    return [
        {
            "name": name,
            "ph": "X",
            "ts": (begin - zero) / 1e3,
            "dur": (end - begin) / 1e3,
            "pid": PROCESS,
            "tid": PROCESS + thread,
            "args": args,
        }
        for (name, thread, begin, end), args in calls + spans
    ]
