"""Reads prompts, and windows again, for texts that need it before their next token. In slices of time."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.logprobs import TokenLogprob
from shakespeare.generation.request import Text


@dataclass(frozen=True)
class Read:
    """A prompt in a slot. top: alternatives of its log-probabilities; None without log-probabilities."""

    prompt: tuple[int, ...]
    slot: int
    top: int | None
    logprobs: list[TokenLogprob]  # of prompt[1:]

    def begins(self, text: Text) -> bool:
        """Whether a text can begin with a copy of this prompt."""
        wanted = text.prompt_top
        enough = wanted is None or self.top is not None and self.top >= wanted
        return text.is_new and text.prompt == self.prompt and enough

    def begin(self, text: Text) -> None:
        """Record that a text's slot holds this prompt."""
        text.cached = len(self.prompt)
        top = text.prompt_top
        if top is not None:
            text.prompt_logprobs = [None, *(each._replace(top=each.top[:top]) for each in self.logprobs)]


class Reader:
    """Reads for the texts of a Writer. A prompt that several texts wait for is read once and copied.

    keeper: the slot that keeps the last prompt for later texts, or None. slice_seconds: the time of a read().
    """

    def __init__(self, engine: Engine, keeper: int | None, slice_seconds: float) -> None:
        self.waiting: dict[Text, None] = {}  # in the order in which they began to wait
        self._engine = engine
        self._keeper = keeper
        self._slice = slice_seconds
        self._begun: dict[Text, int | None] = {}  # texts that are partly read, with their Read.top
        self._kept: Read | None = None
        self._shortest_is_due = False

    def read(self, texts: Iterable[Text]) -> None:
        """Read for those of these texts that need it, and for the waiting ones, until the time is over.

        The longest waiting text and the shortest take turns of at most half of the time, so none starves.
        """
        end = time.perf_counter() + self._slice
        self.waiting.update((text, None) for text in texts if text.needs_reading)
        if self._kept:
            self._copy(self._kept)
        while self.waiting:
            shortest = min(self.waiting, key=lambda text: len(text.window)) if self._shortest_is_due else None
            self._shortest_is_due = not self._shortest_is_due
            turn = time.perf_counter() + self._slice / 2
            self._go_on(shortest or next(iter(self.waiting)), min(turn, end))
            if time.perf_counter() >= end:
                return

    def drop(self, text: Text) -> None:
        """Forget a text and free the memory of its unfinished reading."""
        self.waiting.pop(text, None)
        if text in self._begun:
            del self._begun[text]
            self._engine.drop(text.slot)

    def _go_on(self, text: Text, end: float) -> None:
        """Read until `end`, at least one piece of work, for a text or for one with the same prompt."""
        if text.is_new:
            same = (other for other in self._begun if other.is_new and other.prompt == text.prompt)
            text = next(same, text)
        if text not in self._begun:
            self._begun[text] = top = self._top(text)
            self._engine.begin(text.slot, text.window, not text.is_new, top)
        if self._engine.read(text.slot, max(0.0, end - time.perf_counter())):
            self._finish(text, self._begun.pop(text))

    def _top(self, text: Text) -> int | None:
        """The most alternatives that any new text with the same prompt requests."""
        if not text.is_new:
            return None
        same = (other for other in self.waiting if other.is_new and other.prompt == text.prompt)
        tops = (other.prompt_top for other in same)
        return max((top for top in tops if top is not None), default=None)

    def _finish(self, text: Text, top: int | None) -> None:
        """Record that a text's window is read. Copy a prompt to the other texts that wait for it."""
        del self.waiting[text]
        if not text.is_new:
            text.cached = len(text.window)
            return
        taken = [] if top is None else self._engine.take_logprobs(text.slot)
        done = Read(text.prompt, text.slot, top, list(map(TokenLogprob._make, taken)))
        done.begin(text)
        self._copy(done)
        if self._keeper is not None:
            if self._kept is None or self._kept.prompt != text.prompt:
                self._engine.copy(text.slot, self._keeper)
            self._kept = replace(done, slot=self._keeper)

    def _copy(self, source: Read) -> None:
        """Copy a prompt, from a slot without a new token, to the waiting texts that begin with it."""
        texts = [text for text in self.waiting if text not in self._begun and source.begins(text)]
        if texts:
            self._engine.copy(source.slot, *(text.slot for text in texts))
        for text in texts:
            source.begin(text)
            del self.waiting[text]
