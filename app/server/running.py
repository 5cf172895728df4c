"""The process of a server: its socket, its signals, and the connections' own limits."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.server.app import Application
from app.server.endpoints import ABORT
from app.server.settings import Settings
from model.checkpoint import Checkpoint

HEAD_BYTES = 65_536  # of a request's line and headers
HEAD_SECONDS = 10.0  # in which they must arrive
SEND_BUFFER = 131_072  # bytes that the system keeps for a reader
BACKLOG = 1024


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits for the head of a request, and a way to close a connection at once."""

    _head = 0  # bytes of the head that is arriving; -1 while a request is answered
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort
        self._begin()

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head >= 0:
            self._head += len(data)
            if self._head > HEAD_BYTES:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._end()
        self._head = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _end(self) -> None:
        self._head = -1
        if self._timer:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn's server, whose first signal lets running requests finish and refuses new ones."""

    def __init__(self, config: uvicorn.Config, application: Application) -> None:
        super().__init__(config)
        self.application = application
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super()._serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self.loop
        self.loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Begin to end; at once if it has begun before."""
        writing = self.application.writing
        if writing.draining:
            writing.end_all()
            self.should_exit = True
            return
        writing.draining = True
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for the running requests, as long as the grace period; then close all connections."""
        writing, grace = self.application.writing, self.application.settings.grace
        deadline = asyncio.get_running_loop().time() + grace
        while writing.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        writing.end_all()
        self.should_exit = True


def bind(settings: Settings) -> socket.socket:
    """A listening socket. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it. Linux would otherwise buffer megabytes for a slow reader.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def make(checkpoints: Mapping[str, Checkpoint], settings: Settings) -> Server:
    """A server that is not running."""
    application = Application(checkpoints, settings)
    config = uvicorn.Config(
        application.asgi,
        http=Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level=logging.WARNING,
        server_header=False,
        backlog=BACKLOG,
        # draining has waited already; what is left is to be closed
        timeout_graceful_shutdown=1,
    )
    return Server(config, application)


def serve(server: Server, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Serve until a signal comes. Raises the error for which an engine could not be opened."""

    async def main() -> None:
        scheduler = server.application.scheduler
        running = asyncio.create_task(server.serve([listener]))
        loaded = asyncio.create_task(scheduler.loaded.wait())
        await asyncio.wait((running, loaded), return_when=asyncio.FIRST_COMPLETED)
        if scheduler.error:
            server.should_exit = True
        elif scheduler.ready:
            say("Ready. Ctrl-C ends it.")
        await running
        loaded.cancel()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.get_loop()
        runner.run(main())
    if error := server.application.scheduler.error:
        raise error
