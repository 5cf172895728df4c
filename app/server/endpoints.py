"""The endpoints that write: read a request, submit it, and send what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from app.server import plan as plans
from app.server.calls import Call
from app.server.errors import ApiError, respond, send_body
from app.server.metrics import Metrics
from app.server.plan import Plan
from app.server.requests import ChatBody, CompletionBody, parse
from app.server.responses import Result, Shape
from app.server.scheduler import Scheduler, retry
from app.server.settings import Settings
from model.checkpoint import Checkpoint

ABORT = "abort"  # key of a function in a scope's state: it closes the connection and drops its buffer
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Writing:
    """An endpoint that writes texts.

    active: the calls in progress. draining: whether new requests are refused because the server is ending.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, Checkpoint],
        scheduler: Scheduler,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.checkpoints, self.scheduler = checkpoints, scheduler
        self.settings, self.metrics = settings, metrics
        self.active: set[Call] = set()
        self.draining = False

    def completions(self, data: bytes) -> Plan:
        """The plan of /v1/completions."""
        body = parse(CompletionBody, data)
        return plans.of_completion(body, self.checkpoint(body.model), self.settings)

    def chat(self, data: bytes) -> Plan:
        """The plan of /v1/chat/completions."""
        body = parse(ChatBody, data)
        return plans.of_chat(body, self.checkpoint(body.model), self.settings)

    def checkpoint(self, model: str) -> Checkpoint:
        """The model of this name. Raises ApiError 404."""
        if model not in self.checkpoints:
            raise ApiError(404, f"The model {model!r:.100} does not exist.", "model", "model_not_found")
        return self.checkpoints[model]

    async def answer(
        self, planned: Callable[[bytes], Plan], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request; raises ApiError before the response has begun."""
        if self.draining:
            close = (("connection", "close"), *retry())
            raise ApiError(503, "The server is ending.", code="shutting_down", headers=close)
        async with asyncio.timeout(self.settings.body_seconds):
            data = await read_body(scope, receive, self.settings.body_bytes)
        if data is None:
            return
        plan = planned(data)
        call = Call(plan, self.settings.buffer_bytes, self.settings.behind_seconds)
        self.scheduler.submit(call)
        self.active.add(call)
        abort = scope.get("state", {}).get(ABORT)
        call.overflowed = lambda: self._drop(call, abort)
        watch = asyncio.create_task(watch_for_end(receive, lambda: self._leave(call)))
        try:
            await (self._stream if plan.stream else self._whole)(call, send)
        finally:
            watch.cancel()
            self._leave(call)  # ends the unfinished texts
            self.active.discard(call)

    async def _whole(self, call: Call, send: Send) -> None:
        results = [Result(number) for number in range(len(call.choices))]
        while not all(result.finish for result in results):
            for piece in await call.pieces():
                results[piece.number].add(piece)
            if call.gone:
                return
        await respond(send, 200, Shape(call.plan).whole(results))

    async def _stream(self, call: Call, send: Send) -> None:
        shape = Shape(call.plan)
        tokens = [0] * len(call.choices)
        left = len(tokens)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        if begin := shape.begin():
            await send_body(send, begin, more=True)
        while left:
            try:
                pieces = await call.pieces()
            except ApiError as error:
                await send_body(send, shape.failed(error))
                return
            if call.gone:
                return
            events = [shape.event(piece) for piece in pieces]
            for piece in pieces:
                tokens[piece.number] = piece.new_tokens
                left -= piece.finish is not None
            if not left:
                events.append(shape.end([Result(i, new_tokens=count) for i, count in enumerate(tokens)]))
            await send_body(send, b"".join(events), more=bool(left))

    def _leave(self, call: Call) -> None:
        """Free the slots of a call whose client has left."""
        self.scheduler.cancel(call)
        call.leave()

    def _drop(self, call: Call, abort: Callable[[], Any] | None) -> None:
        """Close a connection whose reader is too slow."""
        self.metrics.dropped.inc()
        if abort:
            abort()  # ends the call when the connection is lost, without uvicorn's log entry
        else:
            self._leave(call)

    def end_all(self) -> None:
        """End all requests: a stream's last event is an error, the others get 503."""
        for call in list(self.active):
            call.put(ApiError(503, "The server ended before the text did.", code="shutting_down"))


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """A request's body; None if the client has left. Raises ApiError 413 or 415."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # a browser sends it to another site only with that site's consent
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    too_long = ApiError(
        413,
        f"The body is longer than {most} bytes.",
        code="body_too_large",
        headers=(("connection", "close"),),
    )
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > most:
        raise too_long
    data = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        data += message.get("body", b"")
        if len(data) > most:
            raise too_long
        if not message.get("more_body"):
            return data


async def watch_for_end(receive: Receive, leave: Callable[[], None]) -> None:
    """Call leave() when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
