"""gpt.py profile: where the time of a token goes, or of a training step.

Spans of an engine's work make a table of tokens. In the cuda engine they are clocks in the kernel. A training
step's are its own, of C++, or those of PyTorch's profiler.

The native engine records its spans itself (generation/csrc/). The PyTorch model gets hooks on its modules;
a span is the time in a module outside of those in it.

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
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from shakespeare.attention_ext.parts import check_compatible, helpers_of
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.native import Decoder
from shakespeare.generation.engines.pytorch import TorchEngine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Uniforms
from shakespeare.generation.texts import slots_for
from shakespeare.generation.writer import Writer
from shakespeare.lab.formats import counted, markdown
from shakespeare.lab.machine import Load, busy_text
from shakespeare.lab.timing import Clock
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.config import GPTConfig
from shakespeare.training.recipe import Recipe
from shakespeare.training.trainer import Trainer

KINDS = (
    *("embedding", "norm", "QKV", "attention", "projection", "MLP up", "MLP GELU", "MLP down"),
    *("head", "sampling", "draft", "waiting"),
)
# Kinds of the PyTorch model's modules, by their names or those with their parents'.
MODULES = {
    **dict.fromkeys(("wte", "wpe", "drop"), "embedding"),
    **dict.fromkeys(("ln_1", "ln_2", "ln_f"), "norm"),
    "c_attn": "QKV",
    "attn": "attention",
    "attn.c_proj": "projection",
    "c_fc": "MLP up",
    "mlp": "MLP GELU",
    "mlp.c_proj": "MLP down",
    "lm_head": "head",
}
DEFAULT_TOKENS = 200  # tokens to write if the block size allows it
REPETITIONS = 9  # repetitions with recording, and as many without; odd, so that one is the median
CUDA_REPETITIONS = 5
SEED = 1337
# For training steps.
CHARACTERS = 2048  # characters of a batch by default
SHOWN = 12  # PyTorch's operators in the table
SECONDS = 2.0  # time of a profile
MIN_STEPS = 5
MAX_STEPS = 100
SIZES = ("block_size", "n_layer", "n_head", "n_embd")  # fields of GPTConfig and Recipe


class Span(NamedTuple):
    """Work of a thread, from begin to end in nanoseconds of monotonic_ns(); thread 0 is the caller."""

    kind: str
    thread: int
    begin: int
    end: int


class Hooks:
    """The spans of a PyTorch engine by hooks on the model's modules, all in the calling thread."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._choose = engine.choose
        self._spans: list[Span] = []
        self._handles: list[Any] = []
        self._inside: list[str] = []  # kinds of work that have begun, each in the one before
        self._begun = 0

    def record(self, on: bool) -> None:
        """Switch recording on or off; initially off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._engine.choose = self._timed_choice if on else self._choose
        for name, module in self._engine.model.named_modules() if on else ():
            path = name.split(".")
            kind = MODULES.get(".".join(path[-2:])) or MODULES.get(path[-1])
            if kind:
                self._handles.append(module.register_forward_pre_hook(partial(self._enter, kind)))
                self._handles.append(module.register_forward_hook(self._leave))

    def spans(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def _end_span(self) -> None:
        now = monotonic_ns()
        if self._inside:
            self._spans.append(Span(self._inside[-1], 0, self._begun, now))
        self._begun = now

    def _enter(self, kind: str, *_: Any) -> None:
        self._end_span()
        self._inside.append(kind)

    def _leave(self, *_: Any) -> None:
        self._end_span()
        self._inside.pop()

    def _timed_choice(self, *arguments: Any) -> Any:
        self._enter("sampling")
        tokens = self._choose(*arguments)
        self._leave()
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
        rest = [wall for _ in range(self.threads)]  # nanoseconds of each thread without a span
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
    options: EngineOptions,
    model: str,
    prompt_tokens: int | None,
    tokens: int | None,
    texts: int,
) -> dict[str, Any]:
    """The figures() of the reading of a prompt and the writing of `tokens` tokens of each text after it.

    The prompt is the model's own text after token 0. The first token after it is not measured. model: the
    checkpoint's name. prompt_tokens, tokens: as in lengths(). texts: are written together. Raises TypeError
    or ValueError naming a wrong argument, BuildError.
    """
    prompt_tokens, tokens = lengths(checkpoint, prompt_tokens, tokens)
    capacity = prompt_tokens + tokens
    options = replace(options, capacity=capacity)
    max_texts, _ = slots_for(2**31, checkpoint.config, replace(options, threads=2**31))
    if not 1 <= texts <= max_texts:
        raise ValueError(
            f"texts is {texts}; it must be from 1 to {max_texts} with caches of {capacity} tokens"
        )
    engine = open_engine(checkpoint, replace(options, slots=texts))
    settings = {
        "model": model,
        "part": options.part,
        "engine": engine.name,
        "simd": helpers_of(options.part, options.simd),
        "weights": options.weights,
        "kv_cache": options.kv_cache,
        "threads": torch.get_num_threads(),
        "texts": texts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": tokens,
        "repetitions": REPETITIONS,
    }
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
    ids = _model_text(engine, prompt_tokens)
    span_recorder = recorder(engine)
    phases: dict[bool, list[tuple[Phase, Phase]]] = {False: [], True: []}
    for repetition in range(-1, REPETITIONS):
        for recorded in (False, True) if repetition % 2 else (True, False):
            pair = _repetition(engine, span_recorder, recorded, ids, tokens)
            if repetition >= 0:  # the first one warms up
                phases[recorded].append(pair)
    prefill, decode = (sorted(repeated, key=lambda phase: phase.seconds) for repeated in zip(*phases[True]))
    plain = [statistics.median(phase.seconds for phase in repeated) for repeated in zip(*phases[False])]
    return prefill[REPETITIONS // 2], decode[REPETITIONS // 2], plain


def _model_text(engine: Engine, prompt_tokens: int) -> list[int]:
    """The model's text after token 0, which is the first of these tokens."""
    writer = _writer(engine, [0], 1)
    ids = [0]
    while len(ids) < prompt_tokens:
        ids += [token for _, tokens in writer.step(1) for token in tokens]
    return ids


def _repetition(
    engine: Engine, span_recorder: Any, recorded: bool, ids: Sequence[int], tokens: int
) -> tuple[Phase, Phase]:
    """One prefill, and the decoding of a text in each of the engine's slots after it."""
    threads = torch.get_num_threads() if engine.name == "native" else 1

    def phase(call: Callable[[int], int], left: int) -> Phase:
        """The calls that do `left` pieces of work; each is told how much is left, and returns what it did."""
        span_recorder.record(recorded)
        calls = []
        while left:
            begin = monotonic_ns()
            left -= call(left)
            calls.append((begin, monotonic_ns()))
        span_recorder.record(False)
        return Phase(calls, [Span(*span) for span in span_recorder.spans()], threads)

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
    tokens = steps * settings["texts"]

    def speeds(prefill: float, decode: float) -> dict[str, float]:
        return {
            "prefill_ms": 1e3 * prefill,
            "decode_us_per_step": 1e6 * decode / steps,
            "decode_us_per_token": 1e6 * decode / tokens,
            "tokens_per_second": tokens / decode,
        }

    recorded = speeds(prefill.seconds, decode.seconds)
    rows = []
    for (kind, prefill_share), decode_share in zip(prefill.shares().items(), decode.shares().values()):
        rows.append(
            {
                "kind": kind,
                "prefill_ms": recorded["prefill_ms"] * prefill_share,
                "prefill_percent": 100 * prefill_share,
                "decode_us_per_step": recorded["decode_us_per_step"] * decode_share,
                "decode_us_per_token": recorded["decode_us_per_token"] * decode_share,
                "decode_percent": 100 * decode_share,
            }
        )
    return settings | {"rows": rows, "recorded": recorded, "not_recorded": speeds(*plain)}


def on_cuda(
    checkpoint: Checkpoint,
    options: EngineOptions,
    model: str,
    prompt_tokens: int | None,
    tokens: int | None,
    texts: int,
) -> dict[str, Any]:
    """The figures of `tokens` tokens of each of so many texts in the cuda engine; arguments as run()'s.

    us: microseconds of a step's phases, by the first block's cycles at the highest clock. step_us: without
    the clocks. Raises ValueError and BuildError as open_engine() does.
    """
    from shakespeare.attention_ext.cuda import driver
    from shakespeare.generation.engines.cuda import CudaEngine

    prompt_tokens, tokens = lengths(checkpoint, prompt_tokens, tokens)
    ids = [i % checkpoint.config.vocab_size for i in range(prompt_tokens)]
    best: dict[bool, tuple[float, dict[str, int]]] = {}
    for clocks in (False, True):
        engine = CudaEngine(checkpoint, replace(options, slots=texts), clocks=clocks)
        uniforms = Uniforms(0)
        for _ in range(CUDA_REPETITIONS):
            engine.begin(0, ids)
            engine.read(0)
            engine.copy(0, *range(1, texts))
            rows = [uniforms(texts) for _ in range(tokens)]
            start = monotonic_ns()
            written = len(engine.write(range(texts), rows, float("inf")))
            step = (monotonic_ns() - start) / written
            if clocks not in best or step < best[clocks][0]:
                best[clocks] = step, {name: n // written for name, n in engine.cycles().items()}
    return {
        "model": model,
        "engine": engine.description,
        "weights": options.weights,
        "kv_cache": options.kv_cache,
        "texts": texts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": tokens,
        "us": {name: 1e6 * cycles / driver.gpu().hertz for name, cycles in best[True][1].items()},
        "step_us": 1e-3 * best[False][0],
    }


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
    width = config.n_embd
    length = config.block_size
    weights = config.n_layer * 12 * width * width + config.vocab_size * width
    pairs = batch * config.n_layer * length * (length + 1) // 2
    return 6 * weights * batch * length + 7 * 2 * width * pairs


def training_figures(
    part: str, config: GPTConfig, batch: int | None = None, simd: str = "auto"
) -> dict[str, Any]:
    """The figures of training steps of a model of these sizes; for arguments and errors see trainer().

    rows: the time of each kind of work, the mean of all threads; their sum is step_ms. not_profiled_ms: the
    median step without PyTorch's profiler. processors_taken_by_others: None if unknown.
    The native step always measures itself; its profile is that of the median step. PyTorch's is the mean of
    the steps that its profiler recorded, which costs time.
    """
    batch = max(1, CHARACTERS // config.block_size) if batch is None else batch
    training = trainer(part, config, batch, simd)
    load = Load()
    clock = Clock()
    steps = max(MIN_STEPS, min(MAX_STEPS, int(SECONDS / max(clock.time(training.step, 2)))))
    plain = statistics.median(clock.time(training.step, steps))
    seconds, kinds = (_native if training.native else _pytorchs)(training, steps)
    kinds["other"] = seconds - sum(kinds.values())
    return {
        "part": part,
        "batch": batch,
        **{name: getattr(config, name) for name in (*SIZES, "vocab_size")},
        "threads": torch.get_num_threads(),
        "steps": steps,
        "rows": [{"kind": kind, "ms": 1e3 * spent} for kind, spent in kinds.items()],
        "step_ms": 1e3 * seconds,
        "not_profiled_ms": 1e3 * plain,
        "gflops": operations(config, batch) / plain / 1e9,
        "processors_taken_by_others": load.others(),
    }


def _native(training: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    measured = []
    for _ in range(steps):
        training.native.take_seconds()
        (seconds,) = Clock().time(training.step, 1)
        measured.append((seconds, training.native.take_seconds()))
    seconds, spent = sorted(measured, key=lambda step: step[0])[steps // 2]
    order = sorted(spent, key=lambda kind: (kind == "waiting", -spent[kind]))  # the largest first
    return seconds, {kind: spent[kind] / torch.get_num_threads() for kind in order}


def _pytorchs(training: Trainer, steps: int) -> tuple[float, dict[str, float]]:
    with profiler(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        seconds = statistics.mean(Clock().time(training.step, steps))
    spent = {event.key: 1e-6 * event.self_cpu_time_total / steps for event in recorded.key_averages()}
    largest = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    rest = sum(spent[name] for name in spent.keys() - set(largest))
    return seconds, {name: spent[name] for name in largest} | {"other operators": rest}


def table(f: dict[str, Any]) -> str:
    """Figures as a Markdown table, with the settings above it and the cost of recording below."""
    form = _cuda_table if "us" in f else _training_table if "step_ms" in f else _token_table
    heading, titles, rows, notes = form(f)
    lines = [heading, "", markdown(titles, rows), "", *notes]
    if "threads" in f:
        lines += busy_text(f["processors_taken_by_others"], f["threads"])
    return "\n".join(lines)


Table = tuple[str, Sequence[str], Sequence[tuple[str, ...]], list[str]]  # heading, titles, rows, notes


def _settings(f: dict[str, Any]) -> str:
    texts = f"{f['texts']} texts, " if f["texts"] > 1 or "us" in f else ""
    return f"{texts}a prompt of {f['prompt_tokens']} tokens, then {f['new_tokens']} more"


def _cuda_table(f: dict[str, Any]) -> Table:
    total = sum(f["us"].values())
    rows = [(name, f"{us:.2f}", f"{100 * us / total:.1f} %") for name, us in f["us"].items()]
    rows.append(("all, with clocks", f"{total:.2f}", "100 %"))
    heading = (
        f"{f['model']}: {f['engine']}, weights in {f['weights']}, cache in {f['kv_cache']}; {_settings(f)}"
    )
    notes = [
        f"Without clocks, with the call: {f['step_us']:.2f} µs per step, "
        f"{1e6 * f['texts'] / f['step_us']:,.0f} tokens/s",
        f"The fastest of {CUDA_REPETITIONS} calls; waiting is the time until other blocks' data are there",
    ]
    return heading, ("", "µs per step", "share"), rows, notes


def _training_table(f: dict[str, Any]) -> Table:
    step = f["step_ms"]
    in_pytorch = f["part"] == "part0"
    rows = [(row["kind"], f"{row['ms']:.2f}", f"{row['ms'] / step:.1%}") for row in f["rows"]]
    rows.append(("step", f"{step:.2f}", "100.0%"))
    heading = (
        f"a training step with {f['part']}, {'PyTorch' if in_pytorch else 'native'}: batch "
        f"{f['batch']}, block {f['block_size']}, {f['n_layer']} layers, {f['n_head']} heads, width "
        f"{f['n_embd']}, {f['vocab_size']} characters; {counted(f['threads'], 'thread')}, {f['steps']} steps"
    )
    notes = []
    if f["threads"] > 1 and not in_pytorch:
        notes.append(f"Rows are the means of {f['threads']} threads, so they add up to the step.")
    plain = f"Not profiled: {f['not_profiled_ms']:.2f} ms"
    notes.append(f"{plain}, {f['gflops']:.0f} GFLOP/s without the optimizers'")
    return heading, ("", "ms", "share"), rows, notes


def _token_table(f: dict[str, Any]) -> Table:
    several = f["texts"] > 1
    total = {"kind": "wall time", "prefill_percent": 100, "decode_percent": 100} | f["recorded"]
    rows = []
    for row in [*f["rows"], total]:
        ms = row["prefill_ms"]
        us = row["decode_us_per_token"]
        if ms or us:
            prefill = (f"{ms:.3f}", f"{row['prefill_percent']:.1f} %") if ms else ("", "")
            decode = [f"{us:.2f}", f"{row['decode_percent']:.1f} %"]
            if several:
                decode.insert(0, f"{row['decode_us_per_step']:.2f}")
            rows.append((row["kind"], *prefill, *decode))
    titles = ("decode, µs per step", "µs per token") if several else ("decode, µs per token",)
    helpers = "" if f["simd"] is None else f", {f['simd']} helpers"
    threads = counted(f["threads"], "thread")
    heading = (
        f"{f['model']}: {f['part']}{helpers}, {f['engine']} engine, weights in {f['weights']}, "
        f"cache in {f['kv_cache']}, {threads}; {_settings(f)}"
    )
    notes = []
    if f["threads"] > 1 and f["engine"] == "native":
        notes.append(f"Rows are the means of {threads}, so they add up to the wall time.")
    for name, speeds in (("Recording", f["recorded"]), ("Not recording", f["not_recorded"])):
        us = f"{speeds['decode_us_per_token']:.2f} µs per token"
        rate = f"{speeds['tokens_per_second']:,.0f} tokens/s"
        notes.append(f"{name}: {speeds['prefill_ms']:.3f} ms, {us}, {rate}")
    notes.append(f"Medians of {REPETITIONS} repetitions of each, in turn")
    return heading, ("", "prefill, ms", "share", *titles, "share"), rows, notes
