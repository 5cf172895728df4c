"""A lane: the texts of one model and part, running and waiting, and the Writer that writes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from app.server.calls import Call
from app.server.choices import Choice, Piece
from app.server.errors import ApiError
from app.server.metrics import Metrics
from generation.engine import Engine
from generation.writer import TOKENS_AT_ONCE, Text, Writer

STEP_TOKENS = 1024  # tokens of all texts in a step; fewer cost speed, more delay new texts
STEP_SECONDS = 0.02  # most time of a step, which writes at least one token of each text
SLICE_SECONDS = 3e-3  # part of a step that prompts may take

Deliver = Callable[[Call, Piece | ApiError], None]


class Lane:
    """Texts join the running batch in the order in which they came, as soon as a slot is free.

    Only the scheduler's thread uses it.
    """

    def __init__(self, model: str, part: str, slots: int, metrics: Metrics, deliver: Deliver) -> None:
        self.name = (model, part)
        self.slots = slots
        self.credit = 0.0  # seconds that the lane may still use in this round
        self.opening = False
        self.left = 0  # texts that ended here, for any reason
        self._deliver = deliver
        self._row_seconds = 0.0  # time for one token of each text in the last step
        self._writer: Writer | None = None
        self._waiting: deque[tuple[Call, Choice]] = deque()
        self._running: dict[Text, tuple[Call, Choice]] = {}
        self._metrics = metrics
        self._queued, self._run = metrics.queued.labels(*self.name), metrics.running.labels(*self.name)
        self._occupancy = metrics.occupancy.labels(*self.name)
        self._new_tokens = metrics.new_tokens.labels(*self.name)

    @property
    def opened(self) -> bool:
        """Whether the lane has an engine."""
        return self._writer is not None

    @property
    def ready(self) -> bool:
        """Whether a step would write."""
        return self.opened and bool(self._running or self._waiting)

    @property
    def wanted(self) -> bool:
        """Whether texts wait for an engine."""
        return not self.opened and not self.opening and bool(self._waiting)

    def open(self, engine: Engine) -> None:
        """Take an engine. It has one slot more than texts, which keeps the last prompt."""
        self._writer = Writer(engine, self.slots, slice_seconds=SLICE_SECONDS)
        self.opening = False

    def add(self, call: Call) -> None:
        """Queue a call's choices."""
        self._waiting.extend((call, choice) for choice in call.choices)
        self._count()

    def cancel(self, call: Call) -> None:
        """End a call's choices that have not ended."""
        waiting = deque(each for each in self._waiting if each[0] is not call)
        ended = len(self._waiting) - len(waiting)
        self._waiting = waiting
        for text in [text for text, (owner, _) in self._running.items() if owner is call]:
            self._leave(text)
            ended += 1
        self.left += ended
        if ended:
            self._metrics.cancelled.labels(*self.name).inc(ended)
        self._count()

    def fail(self, error: ApiError) -> None:
        """End all calls with an error and close the engine. The next text opens another engine."""
        calls = {id(call): call for call, _ in (*self._waiting, *self._running.values())}
        self.left += len(self._waiting) + len(self._running)
        self._waiting.clear()
        self._running.clear()
        self._writer, self.opening = None, False
        for call in calls.values():
            self._deliver(call, error)
        self._count()

    def step(self) -> float:
        """Let texts join, write some tokens of each, and return the seconds that this took."""
        start = time.monotonic()
        assert self._writer
        while self._waiting and self._writer.free:
            self._join(*self._waiting.popleft())
        running = len(self._running)
        if running:
            # A text's first token is sent at once.
            joining = any(choice.delivered_at == 0 for _, choice in self._running.values())
            written = self._writer.step(1 if joining else self._rows(running))
            if written:
                self._row_seconds = (time.monotonic() - start) / len(written[0][1])
            self._hand_over(written)
        return time.monotonic() - start

    def _rows(self, running: int) -> int:
        """The most tokens of each text that a step may write."""
        fitting = STEP_SECONDS / self._row_seconds if self._row_seconds else 1
        return max(1, min(TOKENS_AT_ONCE, STEP_TOKENS // running, int(fitting)))

    def _join(self, call: Call, choice: Choice) -> None:
        assert self._writer
        choice.text = self._writer.join(choice.request)
        self._running[choice.text] = (call, choice)
        self._metrics.prompt_tokens.labels(*self.name).inc(len(choice.request.ids))
        if choice.ended:  # no token was requested
            self._finish(choice.text, time.monotonic())
        self._count()

    def _hand_over(self, written: list[tuple[Text, list[int]]]) -> None:
        """Add the new tokens to their choices and deliver the pieces that are due."""
        now = time.monotonic()
        tokens = 0
        for text, new in written:
            _, choice = self._running[text]
            choice.add(new)
            tokens += len(new)
        self._new_tokens.inc(tokens)
        self._occupancy.observe(len(written))
        for text, (call, choice) in list(self._running.items()):
            if choice.ended:
                self._finish(text, now)
            elif choice.delivered_at == 0 and text.new_tokens:
                self._metrics.first_token.labels(*self.name).observe(now - call.began)
                self._send(call, choice, now)
            elif call.plan.stream and choice.delivered_at and now - choice.delivered_at >= call.plan.interval:
                self._send(call, choice, now)

    def _send(self, call: Call, choice: Choice, now: float) -> None:
        if call.plan.stream and (piece := choice.take()):
            self._deliver(call, piece)
        choice.delivered_at = now

    def _finish(self, text: Text, now: float) -> None:
        call, choice = self._running[text]
        piece = choice.take()
        assert piece
        if choice.delivered_at == 0:
            self._metrics.first_token.labels(*self.name).observe(now - call.began)
        if text.new_tokens > 1:
            self._metrics.token_seconds.labels(*self.name).observe(text.decode_seconds / text.new_tokens)
        self._metrics.finished.labels(*self.name).inc()
        self._leave(text)
        self.left += 1
        self._deliver(call, piece)
        self._count()

    def _leave(self, text: Text) -> None:
        assert self._writer
        del self._running[text]
        self._writer.leave(text)

    def _count(self) -> None:
        self._queued.set(len(self._waiting))
        self._run.set(len(self._running))
