"""The Writer: texts join and leave a batch at any step, each with its own settings.

Weights, precision, prompt, sampling and seed decide a text. It is the same alone, in a batch, and while
neighbours join and leave.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from generation.engine import Engine
from generation.sampling import Sampling

CONTEXTS = ("slide", "reset")
UNIFORMS_AT_ONCE = 256  # one draw costs as much as a small model's token
TOKENS_AT_ONCE = 32  # the most tokens of each text that one step asks an engine for


@dataclass(frozen=True)
class Request:
    """A text to be written.

    ids: the prompt's tokens, at least one. Only as many as the engine's capacity, the last ones, are read.
    seed: 0 to 2**64 - 1. max_new_tokens: the most tokens to write; None sets no limit.
    stop: strings; the text ends before the first one that appears. generation.generate.complete() applies
    them, because the Writer handles tokens only.
    context: what the model sees once a text is longer than the engine's capacity. 'slide': the last
    `capacity` tokens, at positions counted from the window's start, so each token costs a whole window, as
    in nanoGPT. 'reset': the window restarts with its last half, which costs one prefill for each half
    window.
    use_cache: False reads the whole window again for every token.
    Raises TypeError or ValueError naming what is wrong.
    """

    ids: Sequence[int]
    seed: int = 1337
    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    context: str = "slide"
    use_cache: bool = True

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            raise ValueError("prompt is empty; it must have at least one token")
        for name, number in (("seed", self.seed), ("max_new_tokens", self.max_new_tokens)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise TypeError(f"{name} is a {type(number).__name__}; it must be a whole number")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and less than 2**64")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {list(self.stop)!r}; it must hold strings, none of them empty")
        if self.context not in CONTEXTS:
            raise ValueError(f"context is {self.context!r}; it must be one of {', '.join(CONTEXTS)}")


class Text:
    """A text in a slot of an engine, as it grows.

    new_tokens: the number of tokens after the prompt. prefill_seconds: the time of reading the prompt.
    decode_seconds: the time of writing since then, including the work for its neighbours.
    """

    def __init__(self, request: Request, slot: int, capacity: int) -> None:
        self.request, self.slot = request, slot
        self.new_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._capacity = capacity
        self.prompt = tuple(request.ids[-capacity:])  # the part that is read
        self._last = deque(self.prompt, capacity)
        self._held = 0  # tokens in the engine's slot; 0 before the prompt is read
        self._chunks = chunks_of_uniforms(request.seed)
        self._drawn: list[float] = []
        self._used = 0  # of those

    @property
    def remaining(self) -> float:
        """Tokens that may still be written."""
        most = self.request.max_new_tokens
        return float("inf") if most is None else most - self.new_tokens

    @property
    def is_new(self) -> bool:
        """Whether its prompt has not been read yet."""
        return self._held == 0

    @property
    def is_stale(self) -> bool:
        """Whether its window must be read again before the next token."""
        return not self.request.use_cache and self.new_tokens > 0 or self._held > self._capacity

    @property
    def room(self) -> int:
        """Tokens that its slot can take before its window must be read again."""
        return self._capacity + 1 - self._held if self.request.use_cache else 1

    def read(self, engine: Engine) -> None:
        """Read the prompt, or read the window again."""
        count = self._capacity
        if self._held > self._capacity and self.request.context == "reset":
            count = max(1, self._capacity // 2)
        elif 0 < self._held <= self._capacity:
            count = self._held
        ids = list(self._last)[-count:]
        engine.prefill(self.slot, ids, continues=not self.is_new)
        self._held = len(ids)

    def hold_prompt(self) -> None:
        """Record that the prompt was copied to the engine's slot."""
        self._held = len(self.prompt)

    def draw(self, count: int) -> list[float]:
        """The next `count` uniform numbers; append() removes those that were used."""
        if len(self._drawn) < self._used + count:
            self._drawn, self._used = self._drawn[self._used :], 0
            while len(self._drawn) < count:
                self._drawn += next(self._chunks)
        return self._drawn[self._used : self._used + count]

    def append(self, tokens: Sequence[int]) -> None:
        """Record the tokens that the engine has appended; each used one of the numbers drawn."""
        self._used += len(tokens)
        self._last.extend(tokens)
        self._held += len(tokens)
        self.new_tokens += len(tokens)


class Writer:
    """The texts that an engine writes together, one in each slot.

    texts: the most at once; the engine's number of slots by default. If there are fewer texts than slots,
    the last slot keeps the prompt that was read last, and a text with the same prompt copies it from there.
    Raises ValueError if texts is not from 1 to the engine's number of slots.
    """

    def __init__(self, engine: Engine, texts: int | None = None) -> None:
        texts = engine.slots if texts is None else texts
        if not 1 <= texts <= engine.slots:
            raise ValueError(f"texts is {texts}; it must be from 1 to {engine.slots}, the engine's slots")
        self.engine = engine
        self.seconds = 0.0  # of all steps
        self._free = list(range(texts))
        self.texts: list[Text] = []
        self._keeper = engine.slots - 1 if texts < engine.slots else None
        self._kept: tuple[int, ...] = ()  # the prompt in the keeper's slot

    @property
    def free(self) -> int:
        """The number of texts that can join now."""
        return len(self._free)

    def check(self, request: Request) -> None:
        """Raise ValueError if a request's prompt has a token outside the model's vocabulary."""
        vocab_size = self.engine.config.vocab_size
        read = request.ids[-self.engine.capacity :]
        if not all(0 <= token < vocab_size for token in read):
            raise ValueError(f"prompt has a token outside 0 .. {vocab_size - 1}")

    def join(self, request: Request) -> Text:
        """Begin a text; its prompt is read in the next step.

        Raises ValueError as check() does, and if no slot is free.
        """
        self.check(request)
        if not self._free:
            raise ValueError("the writer has no free slot; a text must leave before another can join")
        text = Text(request, self._free.pop(0), self.engine.capacity)
        self.engine.set_sampling(text.slot, request.sampling)
        self.texts.append(text)
        return text

    def leave(self, text: Text) -> None:
        """End a text and free its slot. Raises ValueError if it has left before."""
        self.texts.remove(text)
        self._free.append(text.slot)

    def step(self, most: int = TOKENS_AT_ONCE) -> list[tuple[Text, list[int]]]:
        """Append 1 to `most` tokens to each unfinished text, as many as the engine writes in one call.

        Returns these texts in the order in which they joined, each with its new tokens.
        """
        start = time.perf_counter()
        writing = [text for text in self.texts if text.remaining > 0]
        if not writing:
            return []
        new = [text for text in writing if text.is_new]
        have_read: list[Text] = []
        for text in writing:
            if text.is_new:
                self._read_prompt(text, have_read)
                have_read.append(text)
            elif text.is_stale:
                text.read(self.engine)
        read = time.perf_counter()
        count = int(min(most, TOKENS_AT_ONCE, *(min(text.room, text.remaining) for text in writing)))
        rows = list(zip(*(text.draw(count) for text in writing)))
        steps = self.engine.write([text.slot for text in writing], rows)
        written = [list(tokens) for tokens in zip(*steps)]
        for text, tokens in zip(writing, written):
            text.append(tokens)
        end = time.perf_counter()
        self.seconds += end - start
        for text in writing:
            text.decode_seconds += end - start
        for text in new:  # the time after reading the prompt is decoding
            text.prefill_seconds = read - start
            text.decode_seconds = end - read
        return list(zip(writing, written))

    def _read_prompt(self, text: Text, others: Sequence[Text]) -> None:
        """Read a text's prompt, or copy it from the last slot or from `others`, which hold prompts only."""
        prompt, source = text.prompt, None
        if prompt == self._kept:
            source = self._keeper
        else:
            source = next((other.slot for other in others if other.prompt == prompt), None)
        if source is None:
            text.read(self.engine)
        else:
            self.engine.copy(source, text.slot)
            text.hold_prompt()
        if self._keeper is not None and prompt != self._kept:
            self.engine.copy(text.slot, self._keeper)
            self._kept = prompt


def uniforms(seed: int) -> Iterator[float]:
    """The uniform numbers in [0, 1) that a seed gives, one for each token of its text."""
    return itertools.chain.from_iterable(chunks_of_uniforms(seed))


def chunks_of_uniforms(seed: int) -> Iterator[list[float]]:
    """The numbers of uniforms(), UNIFORMS_AT_ONCE at a time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.rand(UNIFORMS_AT_ONCE, dtype=torch.float64, generator=generator).tolist()
