"""The application: its routes, start and end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.server import page
from app.server.endpoints import Writing
from app.server.errors import ApiError
from app.server.metrics import CONTENT_TYPE, Metrics
from app.server.openapi import document
from app.server.plan import Plan
from app.server.scheduler import Scheduler
from app.server.security import secured
from app.server.settings import Settings
from app.server.site import site
from attention_ext import PARTS
from model.checkpoint import Checkpoint


class Application:
    """A server without its sockets. `asgi` is what an ASGI server calls.

    The scheduler is made when the event loop has started, and lives as long as the loop.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], settings: Settings) -> None:
        self.checkpoints, self.settings = checkpoints, settings
        self.metrics = Metrics()
        self.scheduler = Scheduler(checkpoints, settings, self.metrics)
        self.writing = Writing(checkpoints, self.scheduler, settings, self.metrics)
        self.created = int(time.time())
        self.site = site(settings.page)
        routes = [
            Route("/", self.page),
            Route("/status", self.status_page),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", Answer(self, self.writing.completions), methods=["POST"]),
            Route("/v1/chat/completions", Answer(self, self.writing.chat), methods=["POST"]),
        ]
        starlette = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={
                HTTPException: self._http_error,
                ApiError: self._api_error,
                500: self._failure,
            },
        )
        starlette.router.redirect_slashes = False
        if self.site:
            starlette.router.default = self.site
        self.asgi: ASGIApp = secured(starlette, settings, self._count)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette):
        self.scheduler.start()
        yield
        if self.scheduler.loaded.is_set():  # else its thread waits for a compiler and ends with the process
            await self.scheduler.stop()

    @property
    def serves(self) -> bool:
        """Whether requests are answered: the models are loaded and the server is not ending."""
        return self.scheduler.ready and not self.writing.draining

    async def page(self, request: Request) -> Response:
        return self.site.index() if self.site else await self.status_page(request)

    async def status_page(self, request: Request) -> Response:
        return HTMLResponse(
            page.page(self.checkpoints, self.settings.part, self.status, str(request.base_url)),
            headers=page.HEADERS,
        )

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": self.status}, 200 if self.serves else 503)

    @property
    def status(self) -> str:
        """The status, a word for /health."""
        if self.writing.draining:
            return "shutting down"
        return "ok" if self.scheduler.ready else "failed" if self.scheduler.error else "loading"

    async def metrics_page(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(bool(self.settings.api_keys)))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._shown(name) for name in self.checkpoints]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.writing.checkpoint(name)
        return JSONResponse(self._shown(name))

    def _shown(self, name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "shakespeare-attention",
            "parts": list(PARTS),
            "block_size": self.checkpoints[name].model.config.block_size,
        }

    def _count(self, refusal: ApiError) -> None:
        self.metrics.refused.labels(str(refusal.status)).inc()

    async def _api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._count(error)
        headers = {"content-type": "application/json"} | dict(error.headers)
        return Response(error.body(), error.status, headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        """Answer an error of the router in OpenAI's format."""
        assert isinstance(error, HTTPException)
        path = ascii(request.url.path)[:100]
        message = {404: f"There is no {path}.", 405: f"{path} does not take {request.method}."}
        text = message.get(error.status_code, error.detail)
        shown = ApiError(error.status_code, text, headers=tuple((error.headers or {}).items()))
        return await self._api_error(request, shown)

    async def _failure(self, request: Request, error: Exception) -> Response:
        return await self._api_error(request, ApiError(500, "The server failed; its log says why."))


class Answer:
    """An endpoint as an ASGI application, without Starlette's layers between it and the connection."""

    def __init__(self, app: Application, planned: Callable[[bytes], Plan]) -> None:
        self.app, self.planned = app, planned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: Awaitable[None] = self.app.writing.answer(self.planned, scope, receive, send)
        try:
            await answer
        except TimeoutError:
            raise ApiError(408, "The body took too long.", headers=(("connection", "close"),)) from None
