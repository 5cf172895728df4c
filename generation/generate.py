"""Writing text: from a prompt to tokens, samples and strings, over either engine."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from generation.engine import Engine, open_engine
from generation.sampling import Sampling
from model.checkpoint import Checkpoint
from model.tokenizer import Tokenizer

CONTEXTS = ("slide", "reset")
AT_ONCE = 32  # samples that are decoded together
AHEAD = 32  # tokens of each that an engine is asked for at a time


def uniforms(seed: int) -> Iterator[float]:
    """The numbers in [0, 1) that decide a text's tokens, one each, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:  # many at a time: a draw costs as much as a token of a small model
        yield from torch.rand(256, dtype=torch.float64, generator=generator).tolist()


class Writer:
    """Texts that continue one prompt, token by token, text i in slot i of an engine.

    All of them start in the first call of next().

    prompt: token ids, at least one; of more than the window only the last are read.
    seeds: of each text, at most as many as the engine has slots.
    context: what the model sees once a text is longer than the engine's capacity. 'slide': always the last
    `capacity` tokens, at positions counted from the window's start, so every token costs a whole window, as
    in nanoGPT. 'reset': the window starts again with its last half, at the cost of one prefill for each half
    window.
    use_cache: False reads the whole window anew for every token.
    Raises TypeError or ValueError naming the argument that is wrong.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        context: str = "slide",
        use_cache: bool = True,
    ) -> None:
        if len(prompt) == 0:
            raise ValueError("prompt is empty; it must have at least one token")
        if not all(0 <= token < engine.config.vocab_size for token in prompt):
            raise ValueError(f"prompt has a token outside 0 .. {engine.config.vocab_size - 1}")
        if not 1 <= len(seeds) <= engine.slots:
            raise ValueError(f"seeds are {len(seeds)}; they must be 1 to {engine.slots}, the engine's slots")
        for seed in seeds:
            if not isinstance(seed, int):
                raise TypeError(f"seed is a {type(seed).__name__}; it must be a whole number")
            if not 0 <= seed < 2**64:
                raise ValueError(f"seed is {seed}; it must be at least 0 and less than 2**64")
        if context not in CONTEXTS:
            raise ValueError(f"context is {context!r}; it must be one of {', '.join(CONTEXTS)}")
        self.engine, self.sampling = engine, sampling
        self.prefill_seconds = self.decode_seconds = 0.0
        self._uniforms = [uniforms(seed) for seed in seeds]
        self._drawn: list[deque[float]] = [deque() for _ in seeds]  # and not yet used
        self._window = engine.capacity
        self._kept = max(1, self._window // 2) if context == "reset" else self._window
        self._use_cache = use_cache
        self._last = [deque(prompt, self._window) for _ in seeds]
        self._held = [0] * len(seeds)  # tokens in each slot

    def next(self, texts: Sequence[int]) -> list[int]:
        """Append a token to each of these texts; gives them in the same order."""
        return self.write(texts, 1)[0]

    def write(self, texts: Sequence[int], most: int) -> list[list[int]]:
        """Append 1 to `most` tokens to each of these texts, as many as the engine makes in one go.

        Gives a list for each step, of the texts' tokens in the same order.
        """
        start = begin = time.perf_counter()
        if not (self._use_cache and all(0 < self._held[i] <= self._window for i in texts)):
            first = not self._held[texts[0]]
            self._prefill(texts, first)
            begin = time.perf_counter() if first else start  # what follows the prompt counts as decoding
        room = self._window + 1 - max(self._held[i] for i in texts) if self._use_cache else 1
        numbers = zip(*(self._draw(i, min(most, room, AHEAD)) for i in texts))
        steps = self.engine.write(texts, list(numbers), self.sampling)
        for i, tokens in zip(texts, zip(*steps)):
            self._last[i].extend(tokens)
            self._held[i] += len(tokens)
            for _ in tokens:
                self._drawn[i].popleft()
        self.prefill_seconds += begin - start
        self.decode_seconds += time.perf_counter() - begin
        return steps

    def _draw(self, i: int, count: int) -> list[float]:
        """The next numbers of text i, which are taken from `drawn` when they have been used."""
        drawn = self._drawn[i]
        while len(drawn) < count:
            drawn.append(next(self._uniforms[i]))
        return list(itertools.islice(drawn, count))

    def _prefill(self, texts: Sequence[int], first: bool) -> None:
        """Read the prompt, or the windows of those texts that are full."""
        for i in texts:
            held = self._held[i]
            if first and i != texts[0]:  # all continue one prompt
                self.engine.copy(texts[0], i)
                self._held[i] = self._held[texts[0]]
            elif not 0 < held <= self._window or not self._use_cache:
                count = self._window if held == 0 else self._kept if held > self._window else held
                ids = list(self._last[i])[-count:]
                self.engine.prefill(i, ids, continues=held > 0)
                self._held[i] = len(ids)


class StopFilter:
    """Passes text on until one of the stop strings appears; holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop is {list(stop)!r}; it must hold strings, none of them empty")
        self.stop, self._held = tuple(stop), ""
        self.found: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """What of the text so far may be shown now; sets `found` where it ends."""
        if not self.stop:
            return text
        self._held += text
        found = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.found = min(found)
            return self._release(at)
        longest = max(
            (n for s in self.stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0
        )
        return self._release(len(self._held) - longest)

    def end(self) -> str:
        """What was held back, as no stop string came of it."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released


@dataclass
class Completion:
    """One finished sample: its text, without the prompt, and what it took.

    pieces: of the text; whoever shows them as they come clears them, so that an endless text takes no memory.
    finish_reason: 'length' or 'stop'. stopped_by: the stop string, which the text does not have.
    The seconds are those of the batch it was decoded in, to its last token.
    """

    seed: int
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    stopped_by: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def text(self) -> str:
        """All of it, or what has come since its pieces were cleared."""
        return "".join(self.pieces)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding."""
        return self.new_tokens / max(self.decode_seconds, 1e-9)


def complete(
    writer: Writer,
    tokenizer: Tokenizer,
    samples: Sequence[Completion],
    max_new_tokens: int,
    stop: Sequence[str] = (),
) -> Iterator[tuple[int, str]]:
    """Write the samples, one for each of the writer's texts; yields (sample, more of its text) as it comes.

    When a sample is finished, its Completion is filled in and an empty text is yielded for it.
    """
    decoders = [tokenizer.decoder() for _ in samples]
    filters = [StopFilter(stop) for _ in samples]
    active = list(range(len(samples)))
    writing, steps = active, deque[list[int]]()  # the samples that were asked for more, and what has come
    for count in range(max_new_tokens + 1):
        for i in [i for i in active if filters[i].found or count == max_new_tokens]:
            active.remove(i)
            sample, stopped_by = samples[i], filters[i].found or ""
            rest = "" if stopped_by else filters[i].feed(decoders[i].end()) + filters[i].end()
            sample.stopped_by, sample.finish_reason = stopped_by, "stop" if stopped_by else "length"
            sample.new_tokens = count
            sample.prefill_seconds, sample.decode_seconds = writer.prefill_seconds, writer.decode_seconds
            if rest:
                sample.pieces.append(rest)
                yield i, rest
            yield i, ""
        if not active:
            return
        if not steps:
            writing = list(active)
            steps.extend(writer.write(writing, max_new_tokens - count))
        for i, token in zip(writing, steps.popleft()):
            if samples[i].finish_reason:  # by now
                continue
            text = filters[i].feed(decoders[i].feed(token))
            if text:
                samples[i].pieces.append(text)
                yield i, text


def generate(
    checkpoint: Checkpoint,
    prompt: str = "\n",
    max_new_tokens: int | None = None,
    *,
    part: str = "part4",
    engine: str | Engine | None = None,
    simd: str = "auto",
    br: int | None = None,
    bc: int | None = None,
    weights: str = "fp32",
    seed: int = 1337,
    temperature: float = 0.8,
    top_k: int | None = 200,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    context: str = "slide",
    use_cache: bool = True,
    stream: bool = False,
) -> str | Iterator[str]:
    """The text that continues `prompt`, without it; with stream=True an iterator over its pieces.

    max_new_tokens: where to stop at the latest; the model's block size unless given.
    part, engine, simd, br, bc, weights: as in model.engine.open_engine; engine may also be one that it
    opened for this model, which need not be made anew for every text, and has settled the others.
    seed: 0 to 2**64 - 1. The same seed gives the same text whatever computes it.
    temperature, top_k, top_p, min_p, repetition_penalty: see model.sampling.Sampling.
    stop: a string or several; the text ends before the first that appears.
    context, use_cache: see Writer.
    Raises ValueError or TypeError naming the argument, before anything is written, and BuildError where the
    kernels cannot be compiled.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is a {type(prompt).__name__}; it must be a string")
    ids = checkpoint.tokenizer.encode(prompt)
    count = new_tokens(checkpoint, max_new_tokens)
    if engine is None or isinstance(engine, str):
        engine = open_engine(
            checkpoint.model,
            engine,
            part=part,
            simd=simd,
            br=br,
            bc=bc,
            weights=weights,
            capacity=capacity_for(checkpoint, len(ids), count),
        )
    if engine.config != checkpoint.model.config:
        raise ValueError("engine was opened for another model; it must be one for the checkpoint's")
    writer = Writer(engine, ids, [seed], sampling, context, use_cache)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    StopFilter(stops)  # checks them
    texts = _text(writer, checkpoint.tokenizer, Completion(seed), count, stops)
    return texts if stream else "".join(texts)


def _text(writer: Writer, tokenizer: Tokenizer, sample: Completion, *end) -> Iterator[str]:
    """The pieces of one sample, which does not keep them; end: complete()'s last arguments."""
    for _, text in complete(writer, tokenizer, [sample], *end):
        sample.pieces.clear()
        if text:
            yield text


def new_tokens(checkpoint: Checkpoint, max_new_tokens: int | None) -> int:
    """How many tokens to write at most; None is the model's block size.

    Raises TypeError if that is no whole number, ValueError if it is negative.
    """
    if max_new_tokens is None:
        return checkpoint.model.config.block_size
    if not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens is a {type(max_new_tokens).__name__}; it must be a whole number")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    return max_new_tokens


def capacity_for(checkpoint: Checkpoint, prompt_tokens: int, count: int) -> int:
    """The context that a text of so many tokens needs: no more than the model's block size."""
    return min(checkpoint.model.config.block_size, max(1, prompt_tokens + count))
