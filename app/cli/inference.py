"""The terminal side of --inference: growing samples, JSON lines, or a text written in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from app.cli.options import EngineOptions, TextOptions
from attention_ext import PARTS, extension
from attention_ext.parts import CachePrecision, helpers_of
from generation.engine import Engine, open_engine
from generation.texts import Completion, capacity_for, complete, slots_for
from generation.writer import Request, Writer
from model.checkpoint import Checkpoint

SEPARATOR = "-" * 15
HELP = (
    "An empty line writes on, /fresh forgets the text, /quit or Ctrl-D ends, Ctrl-C stops the current text."
)

Echo = Callable[..., None]  # click.echo's signature


class Session:
    """What is written and by which engine. Raises ValueError for wrong options.

    prompt: the text to continue; None is a line end that is not shown.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        part: str,
        engine: EngineOptions,
        texts: TextOptions,
        prompt: str | None,
    ) -> None:
        self.checkpoint, self.part, self.engine, self.texts = checkpoint, part, engine, texts
        self.shown_prompt = prompt or ""
        self.prompt = "\n" if prompt is None else prompt
        block_size = checkpoint.model.config.block_size
        self.request = Request(  # of the first sample
            checkpoint.tokenizer.encode(self.prompt),
            texts.seed,
            texts.sampling,
            block_size if texts.max_new_tokens is None else texts.max_new_tokens,
            texts.stop,
            texts.context,
            not texts.no_kv_cache,
        )
        if texts.seed + texts.num_samples > 2**63:
            raise ValueError(f"seed is {texts.seed}; the last sample's must be less than 2**63")

    def requests(self) -> Iterator[Request]:
        """The samples; sample i has the seed SEED + i."""
        for i in range(self.texts.num_samples):
            yield replace(self.request, seed=self.texts.seed + i)

    def open(self, slots: int, capacity: int) -> Engine:
        """Open the requested engine."""
        return open_engine(
            self.checkpoint.model, part=self.part, slots=slots, capacity=capacity, **asdict(self.engine)
        )

    def announce(self, engine: Engine, notice: Echo) -> None:
        """Describe the model, the kernel and the engine."""
        gpt, tokenizer = self.checkpoint.model, self.checkpoint.tokenizer
        notice(f"Running inference using dnn model {self.texts.model}")
        notice(f"number of parameters: {gpt.num_params() / 1e6:.2f}M")
        notice(f"Vocabulary of {len(tokenizer)} tokens from {tokenizer.source}")
        part = PARTS[self.part]
        kernel = f"Attention by {part.summary}"
        if self.engine.device == "cuda":
            from attention_ext.cuda import kernels

            kernel = kernels.describe(self.part, self.engine.step, gpt.config.head_dim)
        elif part.operator:
            kernel = extension.describe(self.engine.simd)
        precisions = {"weights": self.engine.weights, "cache": self.engine.kv_cache}
        rounded = "".join(f", {what} in {name}" for what, name in precisions.items() if name != "fp32")
        notice(f"{kernel}, {engine.name} engine{rounded}")


def write(session: Session, echo: Echo, notice: Echo, as_json: bool = False) -> None:
    """Write all samples to `echo`, in the order of their seeds."""
    count = session.texts.num_samples
    capacity = capacity_for(session.checkpoint, session.request)
    config = session.checkpoint.model.config
    number_bytes = CachePrecision(session.engine.kv_cache).bytes
    cache_bytes = number_bytes * 2 * config.n_layer * config.n_embd * capacity  # K and V
    at_once, slots = slots_for(count, torch.get_num_threads(), cache_bytes)
    engine = session.open(slots, capacity)
    writer = Writer(engine, at_once)
    writer.check(session.request)
    session.announce(engine, notice)
    output = JsonLines(session, engine, echo) if as_json else Samples(session.shown_prompt, count, echo)
    tokens = 0
    for completion, piece in complete(writer, session.checkpoint.tokenizer, session.requests()):
        output.more(completion, piece)
        if not piece:
            tokens += completion.new_tokens
    rate = tokens / max(writer.seconds, 1e-9)
    notice(
        f"{tokens} tokens in {writer.seconds:.2f} s with {session.part}, {engine.name} engine: "
        f"{rate:,.0f} tokens/s"
    )


class Samples:
    """Samples that grow together. They are shown in order; the first unfinished one is shown as it grows."""

    def __init__(self, prompt: str, count: int, echo: Echo) -> None:
        self.prompt, self.count, self.echo = prompt, count, echo
        self.number = 0  # the sample that is being shown
        self.waiting: dict[int, Completion] = {}  # the samples from that one on that have begun
        echo(prompt, nl=False)

    def more(self, completion: Completion, piece: str) -> None:
        """Take what complete() yields."""
        if completion.number < self.number:  # finished and shown
            return
        self.waiting[completion.number] = completion
        while current := self.waiting.get(self.number):
            if text := current.text:
                self.echo(text, nl=False)  # which flushes
                current.pieces.clear()
            if not current.finish_reason:
                return
            self.echo()
            del self.waiting[self.number]
            self.number += 1
            if self.number < self.count:
                self.echo(f"{SEPARATOR}\n{self.prompt}", nl=False)


class JsonLines:
    """Finished samples, each as a line of JSON, in the order of their seeds."""

    def __init__(self, session: Session, engine: Engine, echo: Echo) -> None:
        self.session, self.engine, self.echo = session, engine, echo
        self.number = 0  # the sample that is printed next
        self.finished: dict[int, Completion] = {}

    def more(self, completion: Completion, piece: str) -> None:
        """Take what complete() yields."""
        if piece:
            return
        self.finished[completion.number] = completion
        while completed := self.finished.pop(self.number, None):
            self.echo(json.dumps(record(self.session, self.engine, completed), ensure_ascii=False))
            self.number += 1


def record(session: Session, engine: Engine, completion: Completion) -> dict:
    """What --json prints of a sample."""
    return {
        "model": session.texts.model,
        "part": session.part,
        "engine": engine.name,
        "device": session.engine.device,
        "simd": helpers_of(session.part, session.engine.simd) if session.engine.device == "cpu" else None,
        "threads": torch.get_num_threads(),
        "seed": completion.request.seed,
        "prompt": session.prompt,
        "text": completion.text,
        "prompt_tokens": len(completion.request.ids),
        "new_tokens": completion.new_tokens,
        "prefill_seconds": completion.prefill_seconds,
        "decode_seconds": completion.decode_seconds,
        "tokens_per_second": completion.tokens_per_second,
        "finish_reason": completion.finish_reason,
    }


def converse(session: Session, echo: Echo, notice: Echo) -> None:
    """Write in turns: a line from standard input, then the model's text. Each continues all text before."""
    engine = session.open(1, session.checkpoint.model.config.block_size)
    session.announce(engine, notice)
    notice(HELP)
    tokenizer, seed = session.checkpoint.tokenizer, session.texts.seed
    text = session.shown_prompt
    if text:
        echo(text)
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives input() its history and line editing
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            echo()
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
        if not sys.stdin.isatty():
            echo(line, nl=False)
        completion = None
        try:
            # A new Writer: after Ctrl-C the old one still holds its text.
            for completion, piece in complete(Writer(engine), tokenizer, [request]):
                echo(piece, nl=False)
        except KeyboardInterrupt:
            notice("\n(stopped)", nl=False)
        if completion:
            text += completion.text + completion.stopped_by
        echo()
