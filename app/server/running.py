"""The server's process: its socket, its signals, and the limits of its connections."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import uvicorn
from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shakespeare.app.server import Settings
from shakespeare.app.server.app import ABORT, Application
from shakespeare.app.server.security import LOCALHOST
from shakespeare.model.checkpoint import Checkpoint

HEAD_BYTES = 65_536  # most bytes of a request's line and headers
REST_BYTES = 4_194_304  # most bytes after the head: a body in chunks of a byte takes six times its size
HEAD_SECONDS = 10.0  # time for them to arrive; after a response also for the rest of its request
SEND_BUFFER = 131_072  # bytes that the system buffers for a reader
BACKLOG = 1024
OWN_FILES = 64  # files that the process itself may need
STALL_BYTES = 16_384  # a reader that takes fewer, and not everything, has stalled


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits for requests and readers, and a way to close a connection at once.

    A connection has a timer while no request is being answered. uvicorn's own timer stops at the next byte.
    """

    _head = 0  # bytes of the arriving head; -1 while a request is being answered
    _rest = 0  # bytes that came after the head: of the body, and of headers behind it
    _data = b""  # what is being read
    _again = False  # whether _data is to be read again
    _timer: asyncio.TimerHandle | None = None
    _unread = 0  # bytes that the reader had not taken at the time _since
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            transport.abort()
        else:
            self._arm(transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort
        self._head = self._rest = 0
        self._arm(self.transport.abort)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # _unsupported_upgrade_warning() sees to it
        self._head = -1
        self._arm(None)
        super().on_headers_complete()
        if self.parser.get_http_version() != "1.1":
            end_by_closing(self.cycle)

    def on_message_complete(self) -> None:
        if self._head < 0:  # else it is read again
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Read the request again without its Upgrade header: the parser has left out its body."""
        error, parser = cast(Exception, sys.exception()), self.parser
        if parser.get_method() == b"CONNECT":  # which is an upgrade without that header
            self.send_400_response("This server is no proxy.")
            return
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._data = b"\r\n".join([*lines, b"", self._data[error.args[0] :]])
        self._again, self.parser = True, HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._data, self._again = data, True
        while self._again:
            self._again = False
            super().data_received(self._data)
        self._data = b""
        if self._head >= 0:
            self._head += len(data)
        else:
            self._rest += len(data)
        if self._head > HEAD_BYTES or self._rest > REST_BYTES:
            self.transport.abort()

    def on_response_complete(self) -> None:
        last = not self.pipeline  # no further request was read
        super().on_response_complete()
        if last and not self.transport.is_closing():
            self._arm(self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arm(None)
        super().connection_lost(exc)

    def stalled(self, now: float, seconds: float) -> bool:
        """Whether the reader has taken almost nothing for some seconds. It is called often."""
        size = self.transport.get_write_buffer_size()
        if size == 0 or self._unread == 0 or size <= self._unread - STALL_BYTES:
            self._unread, self._since = size, now
        self._unread = max(self._unread, size)
        return size > 0 and now - self._since > seconds

    def _arm(self, close: Callable[[], None] | None) -> None:
        """Call `close` after HEAD_SECONDS, instead of what was to be called before."""
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_SECONDS, close) if close else None


def end_by_closing(cycle: RequestResponseCycle) -> None:
    """Let the connection's end be that of the body: HTTP/1.0 has no chunks, which uvicorn would send."""
    cycle.chunked_encoding = cycle.keep_alive = cycle.waiting_for_100_continue = False
    send = cycle.send

    async def unframed(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unframed  # type: ignore[method-assign]


class Server(uvicorn.Server):
    """uvicorn's server, whose first signal lets running requests finish and refuses new ones."""

    def __init__(self, config: uvicorn.Config, application: Application) -> None:
        super().__init__(config)
        self.application = application
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._drop_stalled())
        await super()._serve(sockets)
        watch.cancel()

    async def _drop_stalled(self) -> None:
        """Drop readers that have stalled, in any response."""
        seconds = self.application.settings.stall_seconds
        while True:
            await asyncio.sleep(min(1.0, seconds / 4))
            for connection in list(self.server_state.connections):
                if cast(Protocol, connection).stalled(asyncio.get_running_loop().time(), seconds):
                    self.application.metrics.dropped.inc()
                    connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self.loop
        self.loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Begin to end; the second call ends at once."""
        application = self.application
        if application.draining:
            application.end_all()
            self.should_exit = True
            return
        application.draining = True
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for the running requests, at most the grace period; then close all connections."""
        application, now = self.application, asyncio.get_running_loop().time
        deadline = now() + application.settings.grace
        while application.active and now() < deadline:
            await asyncio.sleep(0.02)
        application.end_all()
        self.should_exit = True


def bind(settings: Settings) -> socket.socket:
    """A listening socket; that of localhost is at 127.0.0.1. Raises OSError."""
    host = "127.0.0.1" if settings.host == LOCALHOST else settings.host
    family, *_ = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: is also every IPv4 address
    at = (host, settings.port)
    listener = socket.create_server(at, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    # Accepted sockets inherit this. Otherwise Linux would buffer megabytes for a slow reader.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return listener


def make(checkpoints: Mapping[str, Checkpoint], settings: Settings) -> Server:
    """A server that does not run yet."""
    application, most = Application(checkpoints, settings), settings.connections
    if sys.platform != "win32":  # which has no such limit
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            most = min(most, max(files - OWN_FILES, 1))
    config = uvicorn.Config(
        application.asgi,
        http=Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level=logging.WARNING,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=most + 1,  # Protocol refuses one before
        timeout_graceful_shutdown=1,  # _drain() has waited already
    )
    return Server(config, application)


def serve(server: Server, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Serve until a signal comes. Raises the error that kept an engine from opening."""

    async def main() -> None:
        scheduler, settings = server.application.scheduler, server.application.settings
        listeners = [listener]
        if settings.host == LOCALHOST:  # programs may take it for ::1
            with suppress(OSError):  # there is no IPv6, or another program has the port
                listeners.append(bind(replace(settings, host="::1", port=listener.getsockname()[1])))
        running = asyncio.create_task(server.serve(listeners))
        loaded = asyncio.create_task(scheduler.loaded.wait())
        await asyncio.wait((running, loaded), return_when=asyncio.FIRST_COMPLETED)
        if scheduler.error:
            server.should_exit = True
        elif scheduler.ready and not server.application.draining:
            say("Ready. Ctrl-C ends it.")
        await running
        loaded.cancel()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.get_loop()
        runner.run(main())
    if error := server.application.scheduler.error:
        raise error
