"""--inference: samples to standard output as they are made, as JSON lines, or a text written in turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attention_ext import PARTS, extension
from attention_ext.parts import helpers_of
from generation.engine import Engine, open_engine
from generation.generate import AT_ONCE, Completion, StopFilter, Writer, capacity_for, complete, new_tokens
from generation.sampling import Sampling
from model.checkpoint import Checkpoint

SEPARATOR = "-" * 15
HELP = "Write on with an empty line; /fresh forgets the text, /quit or Ctrl-D ends, Ctrl-C stops a text."

Echo = Callable[..., None]  # click.echo's signature


@dataclass(frozen=True)
class Request:
    """What is to be written, and by what."""

    model: str
    part: str
    engine: str | None
    simd: str
    br: int | None
    bc: int | None
    weights: str
    prompt: str | None
    max_new_tokens: int | None
    num_samples: int
    seed: int
    sampling: Sampling
    stop: tuple[str, ...]
    context: str
    use_cache: bool


class Session:
    """A request and the checkpoint it is made of. Raises ValueError for what is wrong with it."""

    def __init__(self, request: Request, checkpoint: Checkpoint) -> None:
        self.request, self.checkpoint = request, checkpoint
        self.prompt = "\n" if request.prompt is None else request.prompt
        self.ids = checkpoint.tokenizer.encode(self.prompt)
        self.count = new_tokens(checkpoint, request.max_new_tokens)
        StopFilter(request.stop)  # checks them
        if request.seed + request.num_samples > 2**63:
            raise ValueError(f"seed is {request.seed}; the last sample's must be less than 2**63")

    def open(self, slots: int, capacity: int) -> Engine:
        """The engine that was asked for."""
        r = self.request
        return open_engine(
            self.checkpoint.model,
            r.engine,
            part=r.part,
            simd=r.simd,
            br=r.br,
            bc=r.bc,
            weights=r.weights,
            slots=slots,
            capacity=capacity,
        )

    def writer(self, engine: Engine, ids: Sequence[int], seeds: Sequence[int]) -> Writer:
        """One that continues `ids`."""
        r = self.request
        return Writer(engine, ids, seeds, r.sampling, r.context, r.use_cache)

    def announce(self, engine: Engine, notice: Echo) -> None:
        """Say what is about to write."""
        gpt, tokenizer, r = self.checkpoint.model, self.checkpoint.tokenizer, self.request
        notice(f"Running inference using dnn model {r.model}")
        notice(f"number of parameters: {gpt.num_params() / 1e6:.2f}M")
        notice(f"Vocabulary of {len(tokenizer)} tokens from {tokenizer.source}")
        kernel = (
            extension.describe(r.simd) if PARTS[r.part].operator else f"Attention by {PARTS[r.part].summary}"
        )
        notice(f"{kernel}, {engine.name} engine" + (f", weights in {r.weights}" * (r.weights != "fp32")))


def write(session: Session, echo: Echo, notice: Echo, as_json: bool = False) -> None:
    """Write all samples to `echo`, in order; the first that is unfinished is shown as it grows."""
    r = session.request
    engine = session.open(
        min(r.num_samples, AT_ONCE), capacity_for(session.checkpoint, len(session.ids), session.count)
    )
    tokens, seconds = 0, 0.0
    for start in range(0, r.num_samples, AT_ONCE):
        seeds = range(r.seed + start, r.seed + min(start + AT_ONCE, r.num_samples))
        samples = [Completion(seed, prompt_tokens=len(session.ids)) for seed in seeds]
        writer = session.writer(engine, session.ids, seeds)
        if start == 0:  # what is wrong with the request has been said by now
            session.announce(engine, notice)
        show = None if as_json else Show(start, r.prompt or "", samples, echo)
        unprinted = list(samples)
        for i, text in complete(writer, session.checkpoint.tokenizer, samples, session.count, r.stop):
            if show:
                show.more(i, text)
            while as_json and unprinted and unprinted[0].finish_reason:
                echo(json.dumps(record(session, engine, unprinted.pop(0)), ensure_ascii=False))
        tokens += sum(sample.new_tokens for sample in samples)
        seconds += writer.prefill_seconds + writer.decode_seconds
    rate = tokens / max(seconds, 1e-9)
    notice(f"{tokens} tokens in {seconds:.2f} s with {r.part}, {engine.name} engine: {rate:,.0f} tokens/s")


class Show:
    """Samples that grow together, shown one after the other."""

    def __init__(self, number: int, prompt: str, samples: Sequence[Completion], echo: Echo) -> None:
        self.number, self.prompt, self.samples, self.echo = number, prompt, samples, echo
        self.shown = 0  # samples that are complete on the screen
        self._begin()

    def more(self, i: int, text: str) -> None:
        """Sample i has grown by `text`; an empty one says that it is finished."""
        if i == self.shown and text:
            self.echo(text, nl=False)  # which flushes
            self.samples[i].pieces.clear()
        while self.shown < len(self.samples) and self.samples[self.shown].finish_reason:
            self.echo()
            self.shown += 1
            if self.shown < len(self.samples):
                self._begin()
                self.echo(self.samples[self.shown].text, nl=False)
                self.samples[self.shown].pieces.clear()

    def _begin(self) -> None:
        if self.number + self.shown:
            self.echo(SEPARATOR)
        self.echo(self.prompt, nl=False)


def record(session: Session, engine: Engine, sample: Completion) -> dict:
    """What --json prints of a sample."""
    r = session.request
    simd = helpers_of(r.part, r.simd)
    return {
        "model": r.model,
        "part": r.part,
        "engine": engine.name,
        "simd": simd,
        "threads": torch.get_num_threads(),
        "seed": sample.seed,
        "prompt": session.prompt,
        "text": sample.text,
        "prompt_tokens": sample.prompt_tokens,
        "new_tokens": sample.new_tokens,
        "prefill_seconds": sample.prefill_seconds,
        "decode_seconds": sample.decode_seconds,
        "tokens_per_second": sample.tokens_per_second,
        "finish_reason": sample.finish_reason,
    }


def converse(session: Session, echo: Echo, notice: Echo) -> None:
    """Lines from the terminal and text of the model in turns; each line continues all that stands above."""
    engine = session.open(1, session.checkpoint.model.config.block_size)
    session.announce(engine, notice)
    notice(HELP)
    tokenizer, seed = session.checkpoint.tokenizer, session.request.seed
    text = session.request.prompt or ""
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
        writer, sample = session.writer(engine, ids, [seed]), Completion(seed)
        seed += 1
        if not sys.stdin.isatty():
            echo(line, nl=False)
        try:
            for _, piece in complete(writer, tokenizer, [sample], session.count, session.request.stop):
                echo(piece, nl=False)
        except KeyboardInterrupt:
            notice("\n(stopped)", nl=False)
        text += sample.text + sample.stopped_by
        echo()
