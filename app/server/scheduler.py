"""The thread that owns all engines: requests join and leave at any step, and lanes share the cores fairly.

The event loop and this thread share only two queues. Commands come through a SimpleQueue; each step returns
its events in one call_soon_threadsafe(). A step releases the GIL while the engine computes.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shakespeare.app.server import Settings
from shakespeare.app.server.requests import ApiError
from shakespeare.app.server.responses import Call, Choice
from shakespeare.attention_ext.checks import made
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import NONE
from shakespeare.generation.writer import Writer
from shakespeare.model.checkpoint import Checkpoint

STEP_TOKENS = 1024  # tokens of all texts in a step; fewer cost speed, more delay new texts
STEP_SECONDS = 0.02  # most time of a step, which writes at least one token of each text
SLICE_SECONDS = 3e-3  # part of a step that prompts may take
QUANTUM = 4e-3  # seconds of a lane's turn in deficit round robin (Shreedhar and Varghese 1995)
RETRY = {"retry-after": "1"}  # seconds
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKEN_SECONDS = tuple(m * 10.0**e for e in range(-6, 0) for m in (1, 2, 5)) + (1.0,)
TEXTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)

News = tuple[Call, bytes | ApiError, bool]  # the arguments of Call.put()


# The metrics of a model and part: their kind, name and meaning.
LANE_METRICS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "running": (Gauge, "texts_running", "Texts being written."),
    "queued": (Gauge, "texts_queued", "Texts that wait for a slot."),
    "occupancy": (partial(Histogram, buckets=TEXTS), "batch_texts", "Texts written by a step."),
    "first_token": (
        partial(Histogram, buckets=SECONDS),
        "time_to_first_token_seconds",
        "From a request's arrival to a text's first token.",
    ),
    "token_seconds": (
        partial(Histogram, buckets=TOKEN_SECONDS),
        "time_per_token_seconds",
        "A text's mean time for a token, without its prompt's.",
    ),
    "prompt_tokens": (Counter, "prompt_tokens", "Tokens of the prompts of texts that began."),
    "new_tokens": (Counter, "new_tokens", "Tokens written."),
    "finished": (Counter, "texts_finished", "Texts written to their end."),
    "cancelled": (Counter, "texts_cancelled", "Texts ended because their client left."),
}


class Metrics:
    """The metrics of one server, which prometheus_client shows at /metrics."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._lanes = {
            key: metric(f"attention_{name}", meaning, ("model", "part"), registry=registry)
            for key, (metric, name, meaning) in LANE_METRICS.items()
        }
        self.dropped = Counter("attention_streams_dropped", "Readers dropped as too slow.", registry=registry)
        refused = "attention_requests_refused", "Requests answered by an error.", ("status",)
        self.refused = Counter(*refused, registry=registry)

    def labelled(self, model: str, part: str) -> SimpleNamespace:
        """The metrics of a model and part."""
        return SimpleNamespace(**{name: metric.labels(model, part) for name, metric in self._lanes.items()})


class Lane:
    """The running and waiting texts of one model and part, and their Writer, in the scheduler's thread only.

    Texts join in the order of arrival, as soon as a slot is free. admitted: the texts that came, by the event
    loop's count. left: those that ended. credit: seconds left in this round. deliver: tells the event loop.
    """

    def __init__(
        self, model: str, part: str, settings: Settings, metrics: Metrics, deliver: Callable[[News], None]
    ) -> None:
        self.model = model
        self.part = part
        self.slots = settings.slots
        self._device = settings.device
        self.admitted = 0
        self.left = 0
        self.credit = 0.0
        self.opening = False
        self._metrics = metrics.labelled(model, part)
        self._deliver = deliver
        self._row_seconds = 0.0  # time for one token of each text in the last step
        self._writer: Writer | None = None
        self._waiting: deque[Choice] = deque()

    @property
    def _running(self) -> list[Choice]:
        return list(cast("dict[Choice, None]", self._writer.texts)) if self._writer else []

    @property
    def ready(self) -> bool:
        """Whether a step would write."""
        return self._writer is not None and bool(self._writer.texts or self._waiting)

    @property
    def wanted(self) -> bool:
        """Whether texts wait for an engine that nobody opens."""
        return self._writer is None and not self.opening and bool(self._waiting)

    def open(self, engine: Engine) -> None:
        """Take an engine. It has one slot more than texts, which keeps the last prompt."""
        self._writer = Writer(engine, self.slots, slice_seconds=SLICE_SECONDS)
        self.opening = False

    def add(self, call: Call) -> None:
        """Queue a call's choices."""
        self._waiting.extend(call.choices)
        self._count()

    def cancel(self, call: Call) -> None:
        """End the texts of a call whose client has left or has everything."""
        self._metrics.cancelled.inc(self._end(call))

    def _end(self, call: Call, error: ApiError | None = None) -> int:
        """End a call's choices that have not ended, and return their number. error: is sent to the client."""
        waiting = deque(choice for choice in self._waiting if choice.call is not call)
        running = [choice for choice in self._running if choice.call is call]
        ended = len(self._waiting) - len(waiting) + len(running)
        self._waiting = waiting
        for choice in running:
            cast(Writer, self._writer).leave(choice)
        self.left += ended
        self._count()
        if error:
            self._deliver((call, error, False))
        return ended

    def fail(self, error: ApiError) -> None:
        """End all calls with an error and close the engine. The next text opens another engine."""
        choices = [*self._waiting, *self._running]
        self._writer = None
        self.opening = False
        self._waiting.clear()
        self.left += len(choices)
        self._count()
        for call in {choice.call for choice in choices}:
            self._deliver((call, error, False))

    def step(self) -> float:
        """Let texts join, write some tokens of each, and return the seconds that this took."""
        start = time.monotonic()
        writer = cast(Writer, self._writer)
        while self._waiting and writer.free:
            writer.join(self._waiting[0])
            choice = self._waiting.popleft()
            self._metrics.prompt_tokens.inc(len(choice.request.ids))
            self._count()
        running = self._running
        # A text's first token is sent at once.
        joining = any(choice.sent_at == 0 for choice in running)
        fitting = int(STEP_SECONDS / self._row_seconds) if self._row_seconds else 1
        limit = max(1, min(STEP_TOKENS // len(running), fitting)) if self._device == "cpu" else math.inf
        written = writer.step(1 if joining else limit)  # a call on a GPU ends itself: cuda.SECONDS
        now = time.monotonic()
        if written:
            self._row_seconds = (now - start) / max(1, *(len(tokens) for _, tokens in written))
            self._metrics.new_tokens.inc(sum(len(tokens) for _, tokens in written))
            self._metrics.occupancy.observe(len(written))
        new = dict(written)
        for choice in running:
            try:
                if choice in writer.texts:  # else another text of its request has failed
                    self._send(choice, new.get(choice, NONE), now)
            except Exception as error:  # the error of one request must not end the others
                self._end(choice.call, ApiError(500, f"The request failed: {error}"))
        return time.monotonic() - start

    def _send(self, choice: Choice, tokens: NDArray[Any], now: float) -> None:
        """Append new tokens to a text, and deliver what it has new, if that is due."""
        choice.add(tokens)
        call = choice.call
        first = choice.sent_at == 0
        ended = choice.ended
        if first and (ended or choice.new_tokens):
            self._metrics.first_token.observe(now - call.began)
        elif not ended and (first or now - choice.sent_at < call.interval):
            return
        choice.sent_at = now
        if ended:
            choice.end()
            if choice.new_tokens > 1:
                self._metrics.token_seconds.observe(choice.decode_seconds / choice.new_tokens)
            self._metrics.finished.inc()
            cast(Writer, self._writer).leave(choice)
            self.left += 1
            self._count()
        events = call.event(choice) if call.body.stream else b""
        if events or ended:
            self._deliver((call, events, ended))

    def _count(self) -> None:
        self._metrics.queued.set(len(self._waiting))
        self._metrics.running.set(len(self._running))


class Scheduler:
    """Writes the texts of calls. Each model and part has a lane, which is opened when it is first used.

    start() opens the lanes of the default part; `loaded` is then set. `error`: why one of them is not open.
    Only the event loop calls the public methods.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], settings: Settings, metrics: Metrics) -> None:
        self.checkpoints = checkpoints
        self.settings = settings
        self.metrics = metrics
        self.error: Exception | None = None
        self.loaded = asyncio.Event()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends the thread
        self._out: list[News] = []
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def ready(self) -> bool:
        """Whether the lanes of the default part are open."""
        return self.loaded.is_set() and self.error is None

    def start(self) -> None:
        """Open the models' engines and begin."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread and drop the unfinished texts."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def submit(self, call: Call) -> None:
        """Queue a call. Raises ApiError 429 if its lane's queue is full, 503 if the models are loading."""
        if not self.ready or not self._thread.is_alive():
            raise ApiError(503, "The models are loading.", code="loading", headers=RETRY)
        lane = self._lane(*call.lane)
        texts = len(call.choices)
        if lane.admitted - lane.left + texts > self.settings.slots + self.settings.queue:
            message = f"The queue of {lane.model} with {lane.part} is full; try again later."
            raise ApiError(429, message, code="rate_limit_exceeded", headers=RETRY)
        lane.admitted += texts
        self._commands.put(partial(lane.add, call))

    def cancel(self, call: Call) -> None:
        """End a call's unfinished texts."""
        self._commands.put(partial(self._lane(*call.lane).cancel, call))

    def _run(self) -> None:
        try:
            for model in self.checkpoints:
                lane = self._lane(model, self.settings.part)
                lane.open(self._engine(lane))
        except Exception as error:  # the compiler failed, or memory did not suffice
            self.error = error
        self._tell(self.loaded.set)
        while not self.error and self._obey():
            for lane in list(self._lanes.values()):
                if lane.wanted:
                    lane.opening = True
                    threading.Thread(target=self._open, args=(lane,), daemon=True).start()
                if not self._turn(lane):
                    return

    def _turn(self, lane: Lane) -> bool:
        """Give a lane its share of the time and obey commands meanwhile. False ends the thread."""
        lane.credit = min(lane.credit, 0) + QUANTUM
        while lane.ready and lane.credit > 0:
            try:
                lane.credit -= lane.step()
            except Exception as error:  # an engine's error must not end the other lanes
                lane.fail(ApiError(500, f"The engine failed: {error}"))
            self._flush()
            if not self._commands.empty() and not self._obey():
                return False
        if not lane.ready:
            lane.credit = 0.0
        return True

    def _obey(self) -> bool:
        """Obey all commands; wait for one if there is nothing to do. False ends the thread."""
        while True:
            idle = not any(lane.ready or lane.wanted for lane in list(self._lanes.values()))
            try:
                command = self._commands.get(block=idle)
            except Empty:
                return True
            if command is None:
                return False
            command()
            self._flush()

    def _lane(self, model: str, part: str) -> Lane:
        if (model, part) not in self._lanes:
            self._lanes[model, part] = Lane(model, part, self.settings, self.metrics, self._out.append)
        return self._lanes[model, part]

    def _engine(self, lane: Lane) -> Engine:
        options = made(EngineOptions, self.settings, part=lane.part, slots=lane.slots + 1)
        return open_engine(self.checkpoints[lane.model], options)

    def _open(self, lane: Lane) -> None:
        """Open a lane's engine in another thread while other lanes write."""
        try:
            self._commands.put(partial(lane.open, self._engine(lane)))
        except ModuleNotFoundError as error:
            refused = ApiError(400, f"{lane.part} needs {error.name}, which this server lacks.", "part")
            self._commands.put(partial(lane.fail, refused))
        except Exception as error:  # reported to the waiting calls
            self._commands.put(partial(lane.fail, ApiError(500, f"{lane.part} cannot be opened: {error}")))

    def _flush(self) -> None:
        """Hand the news to the event loop in one call."""
        if self._out:
            self._tell(_put, self._out.copy())
            self._out.clear()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the server has ended
            self._commands.put(None)


def _put(batch: list[News]) -> None:
    for call, news, ended in batch:
        call.put(news, ended)
