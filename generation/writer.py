"""The Writer: texts join and leave a batch at any step, each with its own settings.

A text depends on weights, precision, prompt, sampling and seed only, not on its neighbours.
"""

import heapq
import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import cache
from shakespeare.attention_ext.checks import real_number, whole_number
from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.logprobs import TokenLogprob
from shakespeare.generation.reading import Reader
from shakespeare.generation.request import Request, Text


class Writer:
    """The batch of texts that an engine writes together, one in each slot: they join, step and leave.

    texts: the most at once; by default the engine's number of slots. With fewer texts than slots, the last
    slot keeps the last prompt, and a text with the same prompt copies it from there. Writers may share an
    engine, also in threads: each text has a slot of its own until it leaves or its Writer is dropped.
    slice_seconds: the approximate time of a step for reading prompts and windows, so that a long one does not
    stop the other texts. It changes no text. seconds: as in Engine.write(), in each step.
    Raises ValueError if texts is not from 1 to the engine's number of slots, or slice_seconds is negative.
    """

    def __init__(
        self,
        engine: Engine,
        texts: int | None = None,
        slice_seconds: float = math.inf,
        seconds: float | None = None,
    ) -> None:
        texts = engine.slots if texts is None else whole_number("texts", texts)
        slice_seconds = math.inf if slice_seconds is None else real_number("slice_seconds", slice_seconds)
        if not 1 <= texts <= engine.slots:
            raise ValueError(f"texts is {texts}; it must be from 1 to {engine.slots}, the engine's slots")
        if not slice_seconds >= 0:
            raise ValueError(f"slice_seconds is {slice_seconds}; it must be at least 0")
        self.engine = engine
        self.seconds = 0.0  # total time of all steps
        self.texts: dict[Text, None] = {}  # in the order in which they joined
        self._max_texts = texts
        self._seconds = seconds
        self._worth = engine.tokens_at_once  # tokens of each text that are worth asking for now
        keeper = engine.slots - 1
        keeps = texts < engine.slots and keeper in engine.free
        if keeps:
            engine.free.remove(keeper)
            heapq.heapify(engine.free)
        self._reader = Reader(engine, keeper if keeps else None, slice_seconds)
        weakref.finalize(self, _give_back, engine.free, self.texts, [keeper] if keeps else []).atexit = False

    @property
    def free(self) -> int:
        """The number of texts that can join now."""
        return min(self._max_texts - len(self.texts), len(self.engine.free))

    def check(self, request: Request) -> None:
        """Raise ValueError if a request's prompt or logit_bias has a token outside the model's vocabulary."""
        vocab_size = self.engine.config.vocab_size
        ids = request.ids[-self.engine.capacity :]
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ValueError(f"prompt has a token outside 0 .. {vocab_size - 1}")
        for token, _ in request.sampling.logit_bias:
            if token >= vocab_size:
                raise ValueError(f"logit_bias has token {token}; it must be from 0 to {vocab_size - 1}")

    @property
    def admits(self) -> bool:
        """Whether a text should join now: an engine that is `fast_in_step` waits until all slots are free."""
        return self.free > 0 and not (self.texts and self.engine.fast_in_step)

    def join(self, text: Request | Text) -> Text:
        """Begin a text, read from the next step on. Raises ValueError as check(), or if no slot is free."""
        text = Text(text) if isinstance(text, Request) else text
        request = text.request
        self.check(request)
        if len(self.texts) == self._max_texts:
            raise ValueError("the writer has no free slot; a text must leave before another can join")
        try:  # The lowest slots: an engine may copy to neighbours at once.
            slot = heapq.heappop(self.engine.free)
        except IndexError:
            slots = self.engine.slots
            must = f"open it with slots={slots + 1} or more, or read those to their end"
            raise ValueError(
                f"the engine's slots are {slots}, and others write in all of them; {must}"
            ) from None
        text.begin(slot, self.engine.capacity, self.engine.config.eos_token_id)
        self.engine.set_sampling(text.slot, request.sampling, request.logprobs)
        self.texts[text] = None
        return text

    def leave(self, text: Text) -> None:
        """End a text and free its slot. Raises ValueError if it has left before."""
        if text not in self.texts:
            raise ValueError("the text has left before")
        del self.texts[text]
        self._reader.drop(text)
        heapq.heappush(self.engine.free, text.slot)

    def step(self, limit: float = math.inf) -> list[tuple[Text, NDArray[Any]]]:
        """Append 1 to `limit` tokens to each unfinished text, as many as the engine writes in one call.

        Returns these texts in the order in which they joined, each with its new tokens, none of them of the
        model's eos_token_id unless the request ignores it. With slice_seconds, texts whose prompt or window
        is not read yet are left out; if there are no others, returns [].
        """
        start = cache.clock()
        unfinished = [text for text in self.texts if not text.ended]
        if not unfinished:
            return []
        new = {text for text in unfinished if text.is_new}
        self._reader.read(unfinished)
        read = cache.clock()
        writing = [text for text in unfinished if text.remaining > 0 and text not in self._reader.waiting]
        written: NDArray[Any] = np.empty((0, 0), int)  # (texts, tokens)
        if writing:
            count = int(min(limit, self._worth, *(min(text.room, text.remaining) for text in writing)))
            uniforms = np.zeros((len(writing), count))
            for row, text in zip(uniforms, writing):
                if text.request.sampling.temperature > 0:  # else nothing is drawn
                    row[:] = text.draw(count)
            rows = self.engine.write([text.slot for text in writing], uniforms.T, self._seconds)
            written = np.ascontiguousarray(rows.T)
            # Numbers beyond what the engine writes in its time are drawn for nothing.
            if len(rows) < count or count == self._worth:
                self._worth = min(2 * len(rows), self.engine.tokens_at_once)
        new_tokens = [text.append(tokens) for text, tokens in zip(writing, written)]
        for text, tokens in zip(writing, new_tokens):
            if text.request.logprobs is not None:
                taken = self.engine.take_logprobs(text.slot)[: len(tokens)]
                text.logprobs += map(TokenLogprob._make, taken)
        end = cache.clock()
        self.seconds += end - start
        for text in unfinished:
            prefilled = start if text not in new else end if text.is_new else read
            text.prefill_seconds += prefilled - start
            text.decode_seconds += end - prefilled
        return list(zip(writing, new_tokens))


def _give_back(free: list[int], texts: Iterable[Text], keeper: list[int]) -> None:
    """Free the slots of a Writer that is dropped."""
    for slot in [*keeper, *(text.slot for text in texts)]:
        heapq.heappush(free, slot)
