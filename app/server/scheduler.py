"""The thread that owns all engines: requests join and leave at any step, and lanes share the cores fairly.

The event loop and this thread share only two queues. Commands come through a SimpleQueue; each step returns
its pieces in one call_soon_threadsafe(). A step releases the GIL while the engine computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any

import torch

from app.server.calls import Call
from app.server.choices import Piece
from app.server.errors import ApiError
from app.server.lanes import Lane
from app.server.metrics import Metrics
from app.server.settings import Settings
from generation.engine import Engine, open_engine
from model.checkpoint import Checkpoint

QUANTUM = 4e-3  # seconds of a lane's turn in deficit round robin (Shreedhar and Varghese 1995)
RETRY_SECONDS = 1


class Scheduler:
    """Writes the texts of calls. Each model and part has a lane, which is opened when it is first used.

    start() opens the lanes of the default part. `ready`: whether they are open. `error`: why one is not open.
    Only the event loop calls the public methods.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], settings: Settings, metrics: Metrics) -> None:
        self.checkpoints, self.settings, self.metrics = checkpoints, settings, metrics
        self.ready = False
        self.error: Exception | None = None
        self.loaded = asyncio.Event()  # set when the scheduler is ready or has failed
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._admitted: dict[tuple[str, str], int] = {}  # texts admitted since the start
        self._commands: SimpleQueue[tuple[str, Any, Any]] = SimpleQueue()
        self._out: list[tuple[Call, Piece | ApiError]] = []
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Open the models' engines and begin."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread and drop the unfinished texts."""
        self._commands.put(("stop", None, None))
        await asyncio.to_thread(self._thread.join)

    def submit(self, call: Call) -> None:
        """Queue a call. Raises ApiError 429 if its lane's queue is full, 503 if the models are loading."""
        if not self.ready or not self._thread.is_alive():
            raise ApiError(503, "The models are loading.", code="loading", headers=retry())
        name = (call.plan.model, call.plan.part)
        texts, admitted = len(call.choices), self._admitted.get(name, 0)
        if self.unfinished(name) + texts > self.settings.slots + self.settings.queue:
            message = f"The queue of {name[0]} with {name[1]} is full; try again later."
            raise ApiError(429, message, code="rate_limit_exceeded", headers=retry())
        self._admitted[name] = admitted + texts
        self._commands.put(("call", name, call))

    def cancel(self, call: Call) -> None:
        """End a call's unfinished texts."""
        self._commands.put(("cancel", (call.plan.model, call.plan.part), call))

    def unfinished(self, name: tuple[str, str]) -> int:
        """The number of texts of a lane that run or wait."""
        lane = self._lanes.get(name)
        return self._admitted.get(name, 0) - (lane.left if lane else 0)

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        try:
            for model in self.checkpoints:
                self._lane((model, self.settings.part)).open(self._engine((model, self.settings.part)))
            self.ready = True
        except Exception as error:  # the compiler failed, or memory did not suffice
            self.error = error
        self._tell(self.loaded.set)
        going = self.error is None
        while going and self._obey():
            for lane in list(self._lanes.values()):
                if lane.wanted:
                    lane.opening = True
                    threading.Thread(target=self._open, args=(lane.name,), daemon=True).start()
                going = going and self._turn(lane)

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
            idle = not any(lane.ready or lane.wanted for lane in self._lanes.values())
            try:
                command, name, argument = self._commands.get(block=idle)
            except Empty:
                return True
            if command == "stop":
                return False
            lane = self._lane(name)
            if command == "call":
                lane.add(argument)
            elif command == "cancel":
                lane.cancel(argument)
            elif isinstance(argument, Exception):
                lane.fail(ApiError(500, f"{name[1]} cannot be opened: {argument}"))
                self._flush()
            else:
                lane.open(argument)

    def _lane(self, name: tuple[str, str]) -> Lane:
        if name not in self._lanes:
            lane = Lane(*name, self.settings.slots, self.metrics, lambda *piece: self._out.append(piece))
            self._lanes[name] = lane
        return self._lanes[name]

    def _engine(self, name: tuple[str, str]) -> Engine:
        s = self.settings
        model = self.checkpoints[name[0]].model
        return open_engine(model, part=name[1], weights=s.weights, kv_cache=s.kv_cache, slots=s.slots + 1)

    def _open(self, name: tuple[str, str]) -> None:
        """Open a lane's engine in another thread while other lanes write."""
        torch.set_num_threads(self.settings.threads)
        try:
            self._commands.put(("opened", name, self._engine(name)))
        except Exception as error:  # reported to the waiting calls
            self._commands.put(("opened", name, error))

    def _flush(self) -> None:
        """Hand the pieces that are due to the event loop in one call."""
        if self._out:
            batch, self._out = self._out, []
            self._tell(_put, batch)

    def _tell(self, function, *arguments) -> None:
        assert self._loop
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the server has ended
            self._commands.put(("stop", None, None))


def _put(batch: list[tuple[Call, Piece | ApiError]]) -> None:
    for call, piece in batch:
        call.put(piece)


def retry() -> tuple[tuple[str, str], ...]:
    """The header that says when to try again."""
    return (("retry-after", str(RETRY_SECONDS)),)
