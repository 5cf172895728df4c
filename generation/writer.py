"""The Writer: texts join and leave a batch at any step, each with its own settings.

Weights, precision, prompt, sampling and seed decide a text. It is the same alone, in a batch, and with
neighbours that join and leave.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import cache
from shakespeare.attention_ext.checks import kind, real, set_defaults, set_whole, truth, whole
from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.logprobs import MOST_TOP
from shakespeare.generation.logprobs import TokenLogprob as TokenLogprob
from shakespeare.generation.reading import Reader
from shakespeare.generation.sampling import Sampling

CONTEXTS = ("slide", "reset")
UNIFORMS_AT_ONCE = 256  # one draw costs as much as a small model's token
NONE = np.empty(0)


@dataclass(frozen=True)
class Request:
    """A text to be written.

    ids: the prompt's tokens, at least one. If they exceed the engine's capacity, only the last ones are read.
    seed: 0 to 2**64 - 1. max_new_tokens: the most tokens to write; None sets no limit.
    stop: strings; the text ends before the first one that appears. generation.texts.complete() applies them,
    because the Writer handles tokens only.
    context: what the model sees when a text is longer than the engine's capacity. 'slide': the last
    `capacity` tokens, at positions counted from the window's start, as in nanoGPT; each token costs a whole
    window. 'reset': the window restarts with its last half, which costs one prefill for each half window.
    use_cache: False reads the whole window again for every token.
    logprobs: give each new token's log-probability with this many alternatives, 0 to 5; None gives none.
    prompt_logprobs: give those of the prompt too; needs logprobs. Neither changes a text.
    Raises TypeError or ValueError naming the wrong argument.
    """

    ids: Sequence[int]
    seed: int = 1337
    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    stop: str | Sequence[str] = ()
    context: str = "slide"
    use_cache: bool = True
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        set_defaults(self)
        if len(self.ids) == 0:
            raise ValueError("prompt is empty; it must have at least one token")
        set_whole(self, "seed", "max_new_tokens", "logprobs")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and less than 2**64")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        if not isinstance(self.stop, Collection) or getattr(self.stop, "shape", None) == ():
            raise TypeError(f"stop is a {kind(self.stop)}; it must be a string or several")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {list(self.stop)!r}; it must hold strings, none of them empty")
        if self.context not in CONTEXTS:
            raise ValueError(f"context is {self.context!r}; it must be one of {', '.join(CONTEXTS)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_TOP:
            raise ValueError(f"logprobs is {self.logprobs}; it must be from 0 to {MOST_TOP}")
        for name in ("use_cache", "prompt_logprobs"):
            object.__setattr__(self, name, truth(name, getattr(self, name)))
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs is True; it must be False where logprobs is None")

    def with_seed(self, seed: int) -> Request:
        """The same with another seed, without the checks, which would cost a tenth of a text on a GPU."""
        made = object.__new__(Request)
        made.__dict__.update(self.__dict__, seed=seed)
        return made


class Text:
    """A growing text in a slot of an engine.

    prompt: the part of the request's prompt that is read. new_tokens: the number of tokens after it.
    remaining: tokens that may still be written.
    prefill_seconds: the time until the prompt is read. decode_seconds: the time of writing since then. Both
    include the work for its neighbours in these steps, but no compilation.
    logprobs: those of the new tokens, if requested; the caller may clear the list.
    prompt_logprobs: those of the tokens of `prompt`, None for the first one. None until the prompt is read,
    or if not requested.
    """

    def __init__(
        self, request: Request, slot: int, capacity: int, uniforms: Callable[[int], NDArray[np.float64]]
    ) -> None:
        self.request, self.slot = request, slot
        self.prompt = tuple(request.ids[-capacity:])
        self.new_tokens = 0
        self.remaining = math.inf if request.max_new_tokens is None else request.max_new_tokens
        self.prefill_seconds = self.decode_seconds = 0.0
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.held = 0  # tokens in the engine's slot; 0 until the prompt is read
        self._capacity = capacity
        self._uncached = not request.use_cache
        self._last = deque(self.prompt, capacity)
        # Whether its window may be read again, for which its tokens are kept.
        self._keeps = self._uncached or len(self.prompt) + self.remaining > capacity + 1
        self._uniforms = uniforms
        self._drawn = NONE  # uniform numbers, one for each of the next tokens

    @property
    def is_new(self) -> bool:
        """Whether its prompt has not been read yet."""
        return self.held == 0

    @property
    def needs_reading(self) -> bool:
        """Whether its prompt must be read before the next token, or its window again."""
        return not 0 < self.held <= self._capacity or self._uncached and self.new_tokens > 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt must be read for log-probabilities, even if no token is to be written."""
        return self.request.prompt_logprobs and self.prompt_logprobs is None

    @property
    def prompt_top(self) -> int | None:
        """Alternatives of each token of the prompt; None if its log-probabilities were not requested."""
        return self.request.logprobs if self.request.prompt_logprobs else None

    @property
    def room(self) -> int:
        """Tokens that fit its slot before its window must be read again."""
        return 1 if self._uncached else self._capacity + 1 - self.held

    @property
    def window(self) -> list[int]:
        """The tokens that are read next: the prompt, or the window again."""
        size = self.held or len(self._last)
        if self.held > self._capacity:
            size = self._capacity if self.request.context == "slide" else max(1, self._capacity // 2)
        return list(self._last)[-size:]

    def draw(self, count: int) -> NDArray[np.float64]:
        """The uniform numbers in [0, 1) for the next tokens; append() removes those that were used."""
        if (lacking := count - len(self._drawn)) > 0:
            drawn = self._uniforms(max(lacking, int(min(UNIFORMS_AT_ONCE, self.remaining))))
            self._drawn = np.concatenate([self._drawn, drawn]) if len(self._drawn) else drawn
        return self._drawn[:count]

    def append(self, tokens: NDArray[Any]) -> None:
        """Record the tokens that the engine has appended. Each used one of the drawn numbers."""
        count = len(tokens)
        self._drawn = self._drawn[count:]
        if self._keeps:
            self._last.extend(tokens.tolist())
        self.held += count
        self.new_tokens += count
        self.remaining -= count


class Writer:
    """The texts that an engine writes together, one in each slot.

    texts: the most at once; by default the engine's number of slots. If there are fewer texts than slots,
    the last slot keeps the last prompt, and a text with the same prompt copies it from there.
    slice_seconds: the approximate time of a step that may go into reading prompts and windows, so that a long
    one does not stop the other texts. It changes no text.
    seconds: as in Engine.write(), in each step.
    Raises ValueError if texts is not from 1 to the engine's number of slots, or slice_seconds is negative.
    """

    def __init__(
        self,
        engine: Engine,
        texts: int | None = None,
        slice_seconds: float = math.inf,
        seconds: float | None = None,
    ) -> None:
        texts = engine.slots if texts is None else whole("texts", texts)
        slice_seconds = math.inf if slice_seconds is None else real("slice_seconds", slice_seconds)
        if not 1 <= texts <= engine.slots:
            raise ValueError(f"texts is {texts}; it must be from 1 to {engine.slots}, the engine's slots")
        if not slice_seconds >= 0:
            raise ValueError(f"slice_seconds is {slice_seconds}; it must be at least 0")
        self.engine = engine
        self.seconds = 0.0  # total time of all steps
        self.texts: dict[Text, None] = {}  # in the order in which they joined
        self._free = list(range(texts))  # a heap
        self._seconds = seconds
        self._worth = engine.tokens_at_once  # tokens of each text that are worth asking for now
        self._reader = Reader(engine, engine.slots - 1 if texts < engine.slots else None, slice_seconds)

    @property
    def free(self) -> int:
        """The number of texts that can join now."""
        return len(self._free)

    def check(self, request: Request) -> None:
        """Raise ValueError if a request's prompt or logit_bias has a token outside the model's vocabulary."""
        vocab_size = self.engine.config.vocab_size
        if not all(0 <= token < vocab_size for token in request.ids[-self.engine.capacity :]):
            raise ValueError(f"prompt has a token outside 0 .. {vocab_size - 1}")
        for token, _ in request.sampling.logit_bias:
            if token >= vocab_size:
                raise ValueError(f"logit_bias has token {token}; it must be from 0 to {vocab_size - 1}")

    def join(self, request: Request) -> Text:
        """Begin a text. Its prompt is read from the next step on.

        Raises ValueError if check() does, or if no slot is free.
        """
        self.check(request)
        if not self._free:
            raise ValueError("the writer has no free slot; a text must leave before another can join")
        uniforms = self.engine.uniforms(request.seed)
        # The lowest slots: an engine may copy to neighbours at once.
        text = Text(request, heapq.heappop(self._free), self.engine.capacity, uniforms)
        self.engine.set_sampling(text.slot, request.sampling, request.logprobs)
        self.texts[text] = None
        return text

    def leave(self, text: Text) -> None:
        """End a text and free its slot. Raises ValueError if it has left before."""
        if text not in self.texts:
            raise ValueError("the text has left before")
        del self.texts[text]
        self._reader.drop(text)
        heapq.heappush(self._free, text.slot)

    def step(self, most: float = math.inf) -> list[tuple[Text, NDArray[Any]]]:
        """Append 1 to `most` tokens to each unfinished text, as many as the engine writes in one call.

        Returns these texts in the order in which they joined, each with its new tokens. With slice_seconds,
        texts whose prompt or window is not read yet are left out; if there are no others, returns [].
        """
        start = cache.clock()
        unfinished = [text for text in self.texts if text.remaining > 0 or text.lacks_prompt_logprobs]
        if not unfinished:
            return []
        new = {text for text in unfinished if text.is_new}
        self._reader.read(unfinished)
        read = cache.clock()
        waiting = self._reader.waiting
        writing = [text for text in unfinished if text.remaining > 0 and text not in waiting]
        written: NDArray[Any] = np.empty((0, 0), int)  # (texts, tokens)
        if writing:
            count = int(min(most, self._worth, *(min(text.room, text.remaining) for text in writing)))
            uniforms = np.zeros((len(writing), count))
            for row, text in zip(uniforms, writing):
                if text.request.sampling.temperature > 0:  # else nothing is drawn
                    row[:] = text.draw(count)
            rows = self.engine.write([text.slot for text in writing], uniforms.T, self._seconds)
            written = np.ascontiguousarray(rows.T)
            # Numbers beyond what the engine writes in its time are drawn for nothing.
            if len(rows) < count or count == self._worth:
                self._worth = min(2 * len(rows), self.engine.tokens_at_once)
        for text, tokens in zip(writing, written):
            text.append(tokens)
            if text.request.logprobs is not None:
                text.logprobs += map(TokenLogprob._make, self.engine.take_logprobs(text.slot))
        end = cache.clock()
        self.seconds += end - start
        for text in unfinished:
            prefilled = start if text not in new else end if text.is_new else read
            text.prefill_seconds += prefilled - start
            text.decode_seconds += end - prefilled
        return list(zip(writing, written))
