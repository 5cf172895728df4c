"""The application: its endpoints, its start and its end."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from shakespeare.app.server import Settings, pages
from shakespeare.app.server.requests import ApiError, Body, ChatBody, CompletionBody, parse
from shakespeare.app.server.responses import Call
from shakespeare.app.server.scheduler import RETRY, Metrics, Scheduler
from shakespeare.app.server.security import secured
from shakespeare.attention_ext import PARTS
from shakespeare.attention_ext.parts import able, compatible
from shakespeare.model.checkpoint import Checkpoint

SLICE_BYTES = 65_536  # bytes of a body that are sent before waiting for the reader
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Application:
    """A server without its sockets; an ASGI server calls `asgi`. The scheduler lives as long as the loop.

    active: the calls in progress. draining: whether new requests are refused because the server is ending.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], settings: Settings) -> None:
        self.checkpoints = checkpoints
        self.settings = settings
        self.metrics = Metrics()
        self.scheduler = Scheduler(checkpoints, settings, self.metrics)
        self.active: set[Call] = set()
        self.draining = False
        self.created = int(time.time())
        page = settings.page
        site = pages.Site(page) if page and page.is_dir() else None
        routes = [
            Route("/", site.index if site else self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", Endpoint(self, CompletionBody), methods=["POST"]),
            Route("/v1/chat/completions", Endpoint(self, ChatBody), methods=["POST"]),
        ]
        self.router = Router(routes, redirect_slashes=False, default=site)
        self.asgi = secured(self._answer, settings, self._refuse)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Errors have OpenAI's format."""
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        scope["app"] = self  # so Starlette's router raises HTTPException
        root = scope["root_path"] = self.settings.root_path  # which a path may have or lack, for Starlette
        is_root = root and scope.get("path") == root
        try:
            if scope.get("method") == "CONNECT":
                raise ApiError(400, "This server is no proxy.", headers={"connection": "close"})
            await (RedirectResponse(f"{root}/") if is_root else self.router)(
                scope, receive, self._patient(send)
            )
        except ApiError as error:
            await self._refuse(error, send)
        except HTTPException as error:
            path = ascii(scope["path"])[:100]
            messages = {404: f"There is no {path}.", 405: f"{path} does not take {scope['method']}."}
            message = messages.get(error.status_code, error.detail)
            await self._refuse(ApiError(error.status_code, message, headers=dict(error.headers or {})), send)
        except TimeoutError:  # the reader is too slow
            self.metrics.dropped.inc()
        except Exception:
            with suppress(RuntimeError):  # raised if the response has begun
                await self._refuse(ApiError(500, "The server failed; its log says why."), send)
            raise

    def _patient(self, send: Send) -> Send:
        """send, in slices. Raises TimeoutError if the reader takes too long for one."""

        async def sent(message: Message) -> None:
            body = message.get("body", b"")
            end = 0
            for end in range(SLICE_BYTES, len(body), SLICE_BYTES):
                await sent({**message, "body": body[end - SLICE_BYTES : end], "more_body": True})
            async with asyncio.timeout(self.settings.stall_seconds):
                await send({**message, "body": body[end:]} if end else message)

        return sent

    async def _refuse(self, error: ApiError, send: Send) -> None:
        self.metrics.refused.labels(str(error.status)).inc()
        await send_response(send, error.body, error.status, error.headers)

    @property
    def status(self) -> str:
        """The status, a word for /health."""
        if self.draining:
            return "shutting down"
        return "ok" if self.scheduler.ready else "failed" if self.scheduler.error else "loading"

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": self.status}, 200 if self.status == "ok" else 503)

    async def metrics_page(self, request: Request) -> Response:
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(generate_latest(self.metrics.registry), media_type=media_type)

    async def openapi(self, request: Request) -> Response:
        from shakespeare.app.server.openapi import document  # most servers are never asked for it

        return JSONResponse(document(bool(self.settings.api_keys), self.settings.root_path))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._shown(name) for name in self.checkpoints]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._shown(request.path_params["name"]))

    def _shown(self, name: str) -> dict[str, Any]:
        device = self.settings.device
        parts = [part for part in able(device) if PARTS[part].operator or find_spec("torch")]
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "shakespeare-attention",
            "parts": parts,
            "block_size": self.checkpoint(name).config.block_size,
        }

    def checkpoint(self, model: str) -> Checkpoint:
        """The model of this name. Raises ApiError 404."""
        if model not in self.checkpoints:
            raise ApiError(404, f"The model {model!r:.100} does not exist.", "model", "model_not_found")
        return self.checkpoints[model]

    def leave(self, call: Call) -> None:
        """Free the slots of a call whose client has left or has everything."""
        self.scheduler.cancel(call)
        call.leave()

    def end_all(self) -> None:
        """End all requests: a stream's last event is an error, the others get 503."""
        for call in self.active:
            call.put(ApiError(503, "The server ended before the text did.", code="shutting_down"))


class Endpoint:
    """An endpoint that writes texts, as an ASGI application, without Starlette's layers around it."""

    def __init__(self, app: Application, schema: type[Body]) -> None:
        self.app = app
        self.schema = schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; raises ApiError before the response has begun."""
        app = self.app
        settings = app.settings
        if app.draining:
            headers = {"connection": "close"} | RETRY
            raise ApiError(503, "The server is ending.", code="shutting_down", headers=headers)
        try:
            async with asyncio.timeout(settings.body_seconds):
                data = await read_body(Request(scope, receive), settings.body_bytes)
        except TimeoutError:
            raise ApiError(408, "The body took too long.", headers={"connection": "close"}) from None
        except ClientDisconnect:
            return

        async def watch_for_end() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            app.leave(call)

        body = parse(self.schema, data)
        reason = compatible(body.part or settings.part, settings.device)
        if reason:
            raise ApiError(400, f"{reason}.", "part")
        # the time ends at once when too much of a stream waits for its reader
        async with asyncio.timeout(None) as patience:
            call = Call(body, app.checkpoint(body.model), settings, partial(patience.reschedule, 0))
            app.scheduler.submit(call)
            app.active.add(call)
            watch = asyncio.create_task(watch_for_end())
            try:
                await (stream if body.stream else whole)(call, send)
            finally:
                watch.cancel()
                app.leave(call)  # ends the unfinished texts
                app.active.discard(call)


async def whole(call: Call, send: Send) -> None:
    """Send the response to a request without a stream."""
    while call.left and not call.gone:
        await call.news()
    if not call.gone:
        await send_response(send, call.response())


async def stream(call: Call, send: Send) -> None:
    """Send the events of a stream."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    events = call.begin()
    more = True
    while more:
        await send({"type": "http.response.body", "body": events, "more_body": True})
        try:
            events = await call.news()
            more = call.left > 0  # now: texts may end while a slow reader is waited for
            events += b"" if more else call.end()
        except ApiError as error:
            events = b"data: " + error.body + b"\n\n"
            more = False
        if call.gone:
            return
    await send({"type": "http.response.body", "body": events, "more_body": False})


async def send_response(send: Send, body: bytes, status: int = 200, headers: Mapping[str, str] = {}) -> None:
    """Send a whole response in JSON."""
    response = Response(body, status, headers, "application/json")
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(request: Request, limit: int) -> bytearray:
    """A request's body. Raises ApiError 413 or 415, or ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # a browser sends it to another site only with that site's consent
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    close = {"connection": "close"}
    long = ApiError(413, f"The body is longer than {limit} bytes.", code="body_too_large", headers=close)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise long
    data = bytearray()  # it may come byte by byte
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise long
    return data
