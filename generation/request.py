"""A request for a text, and the text as it grows: tokens, windows and random numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.checks import set_defaults, set_whole, truth, type_text
from shakespeare.generation.logprobs import TokenLogprob, check_top
from shakespeare.generation.sampling import SEEDS, Sampling, Uniforms, drawn_seed

CONTEXTS = ("slide", "reset")
UNIFORMS_AT_ONCE = 256  # one draw costs as much as a small model's token
NONE = np.empty(0)


@dataclass(frozen=True)
class Request:
    """A text to be written.

    ids: the prompt's tokens, at least one. If they exceed the engine's capacity, only the last ones are read.
    seed: 0 to 2**64 - 1; -1 becomes a random one.
    max_new_tokens: the most tokens to write; None sets no limit.
    stop: strings; the text ends before the first one that appears. A Completion applies them.
    context: what the model sees when a text is longer than the engine's capacity. 'slide': the last
    `capacity` tokens, at positions counted from the window's start, as in nanoGPT; each token costs a whole
    window. 'reset': the window restarts with its last half, which costs one prefill for each half window.
    use_cache: False reads the whole window again for every token.
    ignore_eos: write on after a token of the model's eos_token_id, else the text ends before it.
    logprobs: give each new token's log-probability with 0 to MOST_TOP alternatives; None gives none.
    prompt_logprobs: give those of the prompt too; needs logprobs. Neither changes a text.
    Raises TypeError or ValueError naming the wrong argument.
    """

    ids: Sequence[int]
    _: KW_ONLY
    seed: int = 1337
    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    stop: str | Sequence[str] = ()
    context: str = "slide"
    use_cache: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        set_defaults(self)
        if len(self.ids) == 0:
            raise ValueError("prompt is empty; it must have at least one token")
        set_whole(self, "seed", "max_new_tokens", "logprobs")
        object.__setattr__(self, "seed", drawn_seed(self.seed))
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and less than 2**64")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        if not isinstance(self.stop, Collection) or getattr(self.stop, "shape", None) == ():
            raise TypeError(f"stop is {type_text(self.stop)}; it must be a string or several")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {list(self.stop)!r}; it must hold strings, none of them empty")
        if self.context not in CONTEXTS:
            raise ValueError(f"context is {self.context!r}; it must be one of {', '.join(CONTEXTS)}")
        check_top("logprobs", self.logprobs)
        for name in ("use_cache", "ignore_eos", "prompt_logprobs"):
            object.__setattr__(self, name, truth(name, getattr(self, name)))
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs is True; it must be False where logprobs is None")

    def with_seed(self, seed: int) -> Request:
        """The same with another seed, without the checks, which would cost a tenth of a text on a GPU."""
        request = object.__new__(Request)
        request.__dict__.update(self.__dict__, seed=seed)
        return request


class Text:
    """A growing text; begin() gives it a slot of an engine.

    prompt: the part of the request's prompt that is read. new_tokens: the number of tokens after it.
    remaining: tokens that may still be written. at_eos: whether a token of eos_token_id ended it.
    prefill_seconds: the time until the prompt is read. decode_seconds: the time of writing since then. Both
    include neighbours' work in these steps, but no compilation.
    logprobs: those of the new tokens, if requested; the caller may clear the list. prompt_logprobs: those of
    the tokens of `prompt`, None for the first one. None until the prompt is read, or if not requested.
    """

    slot: int
    prompt: tuple[int, ...]

    def __init__(self, request: Request) -> None:
        self.request = request
        self.new_tokens = 0
        self.at_eos = False
        self.remaining = math.inf if request.max_new_tokens is None else request.max_new_tokens
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.cached = 0  # tokens in the engine's slot; 0 until the prompt is read
        self._uncached = not request.use_cache
        self._uniforms = Uniforms(request.seed)
        self._drawn = NONE  # uniform numbers, one for each of the next tokens

    def begin(self, slot: int, capacity: int, ends: Sequence[int] = ()) -> None:
        """Take a slot with so many tokens of context. ends: the model's eos_token_id."""
        self.slot = slot
        self._capacity = capacity
        self._ends = () if self.request.ignore_eos else ends
        self.prompt = tuple(self.request.ids[-capacity:])
        self._last = deque(self.prompt, capacity)
        # Whether its window may be read again, for which its tokens are kept.
        self._keeps = self._uncached or len(self.prompt) + self.remaining > capacity + 1

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be written, nor to be read for log-probabilities."""
        return self.remaining == 0 and not self.lacks_prompt_logprobs

    @property
    def is_new(self) -> bool:
        """Whether its prompt has not been read yet."""
        return self.cached == 0

    @property
    def needs_reading(self) -> bool:
        """Whether its prompt must be read before the next token, or its window again."""
        return not 0 < self.cached <= self._capacity or self._uncached and self.new_tokens > 0

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
        return 1 if self._uncached else self._capacity + 1 - self.cached

    @property
    def window(self) -> list[int]:
        """The tokens that are read next: the prompt, or the window again."""
        size = self.cached or len(self._last)
        if self.cached > self._capacity:
            size = self._capacity if self.request.context == "slide" else max(1, self._capacity // 2)
        return list(self._last)[-size:]

    def draw(self, count: int) -> NDArray[np.float64]:
        """The uniform numbers in [0, 1) for the next tokens; append() removes those that were used."""
        lacking = count - len(self._drawn)
        if lacking > 0:
            drawn = self._uniforms(max(lacking, int(min(UNIFORMS_AT_ONCE, self.remaining))))
            self._drawn = np.concatenate([self._drawn, drawn]) if len(self._drawn) else drawn
        return self._drawn[:count]

    def append(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Record the tokens that the engine has appended; return those before one that ends the text.

        Each used one of the drawn numbers.
        """
        ends = np.flatnonzero(np.isin(tokens, self._ends)) if self._ends else NONE
        if len(ends):
            tokens = tokens[: ends[0]]
            self.at_eos = True
            self.remaining = len(tokens)
        count = len(tokens)
        self._drawn = self._drawn[count:]
        if self._keeps:
            self._last.extend(tokens.tolist())
        self.cached += count
        self.new_tokens += count
        self.remaining -= count
        return tokens
