"""part0 ... part4: the lab's test of a part; with --inference the part writes text instead."""

import contextlib
import json
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shakespeare.app.cli import options, watch
from shakespeare.app.cli.terminal import notice
from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.cuda.kernels import BACKWARD
from shakespeare.attention_ext.parts import helpers_of

if TYPE_CHECKING:
    from shakespeare.generation.engines.engine import Engine, EngineOptions
    from shakespeare.generation.texts import Completion
    from shakespeare.generation.writer import Writer

LAB_TILE = 256  # the lab's tile, in queries and in keys
RULES = {*options.RULES, "score_mod"}
TEST_ONLY = {"batch", "heads", "N", "d", "causal", "dtype", "backward", "again", *RULES}
NOT_BACKWARD = {"br", "bc", *RULES}
NOT_WITH = {"inference": TEST_ONLY, "backward": NOT_BACKWARD, "interactive": ("num_samples", "as_json")}
BOTH = {"br", "bc", "threads", "simd", "inference", "device", "kernel"}  # that go with test and inference
MEASURED = ("new_tokens", "prefill_seconds", "decode_seconds", "tokens_per_second", "finish_reason")

SEPARATOR = "-" * 15
END = "Ctrl-Z" if sys.platform == "win32" else "Ctrl-D"
HELP = f"An empty line writes on, /fresh forgets the text, /quit or {END} ends"

test_options = options.all_of(
    options.batch(default=1),
    options.heads(default=4),
    options.size("-N", "N", "Sequence length of the test.", default=1024),
    options.width,
    options.tiles(default=LAB_TILE, show_default=f"{LAB_TILE} in the test, auto in --inference"),
    options.threads,
    options.simd,
    options.device,
    options.with_backward,
    options.flag("--causal", "Use a causal mask in the test; the model always uses one."),
    options.rules,
    options.file(
        "--score-mod", "C++ header with a change of the scores: float score(float s, At at).", exists=True
    ),
    options.flag("--backward", "Test the gradients, against float64 and PyTorch; part0 and part4."),
    options.dtype,
    options.flag("--watch", "again", "Run the test again at every save of a source, until Ctrl-C."),
)
inference_options = options.all_of(
    options.flag("--inference", "Write text instead of running the test."),
    options.model,
    options.prompt,
    options.integer("--num-samples", "Samples to write; sample i has the seed SEED + i.", default=2),
    options.sampling,
    options.text_options(),
    options.engine,
    options.weights,
    options.kv_cache,
    options.draft,
    options.flag("--json", "as_json", "Print one JSON object per sample."),
    options.flag("--interactive", "Continue each line that you type."),
)


@dataclass(frozen=True)
class InferenceOptions(options.TextOptions):
    """The values of inference_options."""

    inference: bool
    num_samples: int
    draft: str
    as_json: bool
    interactive: bool


@dataclass(frozen=True)
class PartOptions(InferenceOptions, options.CallOptions):
    """The values of a part's options."""

    threads: int | None
    score_mod: Path | None
    backward: bool
    again: bool


def command_of(part: str) -> click.Command:
    """The command of one row of PARTS."""
    summary = PARTS[part].summary

    @click.command(
        part,
        short_help=f"Test {part} against PyTorch and profile it.",
        help=f"Test {part} ({summary}) against PyTorch and profile it, or write text with it (--inference).",
    )
    @test_options
    @inference_options
    @options.gathered("chosen", PartOptions)
    def command(chosen: PartOptions) -> bool:
        check(part, chosen)
        if chosen.inference or chosen.device != "cpu":
            br = chosen.br if options.is_given("br") else None
            chosen = replace(chosen, br=br, bc=chosen.bc if options.is_given("bc") else None)
        if chosen.inference:
            threads = options.threads_for(chosen.threads)
            from shakespeare.generation.engines.engine import EngineOptions

            run_inference(chosen, options.made(EngineOptions, chosen, part=part, threads=threads))
            return True
        if chosen.again:
            from shakespeare.attention_ext.build.recipes import CSRC

            watch.tests(CSRC)
        return test(part, chosen)

    return command


def check(part: str, chosen: PartOptions) -> None:
    """Raise UsageError for an option that would be ignored, or that the part lacks."""
    if not chosen.inference:
        options.refuse_others(TEST_ONLY | BOTH, "goes with --inference only")
    options.refuse_combinations(not_with=NOT_WITH)
    if chosen.interactive and str(chosen.prompt_file) == "-":
        raise click.UsageError("--prompt-file - does not go with --interactive, which reads standard input")
    options.check(part)
    kernel = chosen.kernel
    if kernel and chosen.backward != (kernel in BACKWARD):
        names = " or ".join(BACKWARD)
        raise click.UsageError(f"kernel is {kernel!r}; it must be {names} with --backward, and only there")


def test(part: str, chosen: PartOptions) -> bool:
    """Run the lab's test of a part or of its gradients; False on a mismatch."""
    threads = options.set_threads(chosen.threads, sleeping=False)
    from shakespeare.lab import correctness
    from shakespeare.lab.bench.cell import Cell

    rules = None if chosen.rules == "none" else chosen.rules
    cell = options.made(Cell, chosen, contender=part, queries=chosen.N, threads=threads, rules=rules)
    # Python's own handler of Ctrl-C would wait until a kernel returns.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return correctness.run(cell, click.echo, chosen.kernel, chosen.score_mod)
    finally:
        signal.signal(signal.SIGINT, before)


class Session:
    """What is written and by which engine. Raises ValueError for wrong options.

    engine: without the capacity. Without a prompt, a line end that is not shown is continued.
    """

    def __init__(self, chosen: InferenceOptions, engine: "EngineOptions") -> None:
        from shakespeare.model import load

        self.chosen = chosen
        self.engine = engine
        self.checkpoint = load(chosen.model)
        tokenizer = self.checkpoint.tokenizer
        prompt = options.read_prompt(chosen.prompt, chosen.prompt_file)
        self.shown_prompt = tokenizer.normal(prompt or "")
        self.prompt = self.shown_prompt or "\n"
        self.request = options.first_request(chosen, self.checkpoint, self.prompt)
        if self.request.seed + chosen.num_samples - 1 > options.LARGEST_SEED:
            raise ValueError(f"seed is {self.request.seed}; the last sample's must be less than 2**63")

    def writer(self, texts: int, capacity: int) -> "Writer":
        """Open the requested engine for so many texts, and say what writes them."""
        from shakespeare.generation.engines.table import choose
        from shakespeare.generation.texts import slots_for
        from shakespeare.generation.writer import Writer

        config = self.checkpoint.config
        sized = replace(self.engine, capacity=capacity)
        at_once, slots = slots_for(texts, config, sized)
        engine, unfit = choose(self.checkpoint, replace(sized, slots=slots))
        writer = Writer(engine, at_once)
        writer.check(self.request)
        for why in unfit:
            notice(why)
        notice(f"Running inference using dnn model {self.chosen.model}")
        notice(f"number of parameters: {config.num_params / 1e6:.2f}M")
        meta = Path(self.checkpoint.tokenizer.source)
        with contextlib.suppress(OSError, ValueError):  # it is outside the current folder, or that is removed
            meta = meta.relative_to(Path.cwd())
        notice(f"Loading meta from {meta}...")
        precisions = {"weights": sized.weights, "cache": sized.kv_cache}
        rounded = "".join(f", {what} in {name}" for what, name in precisions.items() if name != "fp32")
        notice(f"{engine.description}, {engine.name} engine{rounded}")
        return writer


def run_inference(chosen: InferenceOptions, engine: "EngineOptions") -> None:
    """Write the samples, or in turns."""
    session = Session(chosen, engine)
    converse(session) if chosen.interactive else write(session)


def write(session: Session) -> None:
    """Write all samples, in the order of their seeds; the first unfinished one is shown as it grows."""
    from shakespeare.generation.texts import capacity_for, complete

    request = session.request
    count = session.chosen.num_samples
    as_json = session.chosen.as_json
    writer = session.writer(count, capacity_for(session.checkpoint, request))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    ascii = not encoding.lower().startswith("utf")  # a character that stdout lacks must not break the JSON
    requests = (replace(request, seed=request.seed + i) for i in range(count))
    tokens = 0
    shown = 0  # the sample that is shown or printed next
    waiting: dict[int, Completion] = {}  # the samples from that one on that have begun
    if not as_json:
        click.echo(session.shown_prompt, nl=False)
    for completion, piece in complete(writer, session.checkpoint.tokenizer, requests):
        if not piece:
            tokens += completion.new_tokens
        if completion.number >= shown:
            waiting[completion.number] = completion
        while current := waiting.get(shown):
            if not as_json and current.pieces:
                click.echo(current.text, nl=False)  # which flushes
                current.pieces.clear()
            if not current.finish_reason:
                break
            known = record(session, writer.engine, current)
            click.echo(json.dumps(known, ensure_ascii=ascii) if as_json else "")
            del waiting[shown]
            shown += 1
            if not as_json and shown < count:
                click.echo(f"{SEPARATOR}\n{session.shown_prompt}", nl=False)
    rate = tokens / max(writer.seconds, 1e-9)
    done = (
        f"{tokens} tokens in {writer.seconds:.2f} s with {session.engine.part}, {writer.engine.name} engine"
    )
    notice(f"{done}: {rate:,.0f} tokens/s")


def record(session: Session, engine: "Engine", completion: "Completion") -> dict[str, object]:
    """What --json prints of a sample."""
    part = session.engine.part
    return {
        "model": session.chosen.model,
        "part": part,
        "engine": engine.name,
        "device": engine.device,
        "simd": helpers_of(part, session.engine.simd) if engine.device == "cpu" else None,
        "threads": session.engine.threads,
        "seed": completion.request.seed,
        "prompt": session.prompt,
        "text": completion.text,
        "prompt_tokens": len(completion.request.ids),
        **{name: getattr(completion, name) for name in MEASURED},
    }


def converse(session: Session) -> None:
    """Write in turns: a line from standard input, then the model's text. Each continues all text before."""
    from shakespeare.generation.texts import complete
    from shakespeare.generation.writer import Writer

    engine = session.writer(1, session.checkpoint.config.block_size).engine
    notice(f"{HELP}, Ctrl-C stops the current text.")
    tokenizer = session.checkpoint.tokenizer
    seed = session.request.seed
    text = session.shown_prompt
    typed = sys.stdin.isatty()
    if text:
        click.echo(text)
    if typed and sys.platform != "win32":  # whose console has its own
        import readline  # noqa: F401  gives input() its history and line editing
    while True:
        try:
            line = tokenizer.normal(input("> " if typed else ""))
        except EOFError:
            click.echo()
            return
        if line == "/quit":
            return
        if line == "/fresh":
            text = ""
            continue
        addition = f"\n{line}" if line and text and not text.endswith("\n") else line
        try:
            ids = tokenizer.encode(text + addition or "\n")
        except ValueError as error:
            notice(str(error))
            continue
        text += addition
        request = replace(session.request, ids=ids, seed=seed)
        seed += 1
        if not typed:
            click.echo(line, nl=False)
        completion = None
        try:
            # A new Writer: after Ctrl-C the old one still holds its text.
            for completion, piece in complete(Writer(engine), tokenizer, [request]):
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            notice("\n(stopped)", nl=False)
        if completion:
            text += completion.text + completion.stopped_by
        click.echo()
