"""The server's process: its sockets, its signals and its end. hypercorn speaks HTTP on the sockets."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shakespeare.app.hosts import LOCALHOST
from shakespeare.app.server import Settings
from shakespeare.app.server.app import Application
from shakespeare.model.checkpoint import Checkpoint

HEAD_BYTES = 65_536  # most bytes of a request's line and headers, and of the headers after its body
# Time for a head to arrive, from the connection's start or the response before. hypercorn also keeps a
# connection that its client has closed so long.
HEAD_SECONDS = 5.0
SEND_BUFFER = 131_072  # bytes that the system buffers for a reader
BACKLOG = 1024
FILES = 65_536  # connections that may be open, if the system allows as many
END_SECONDS = 1.0  # for the last bytes of the connections when the server ends


class Server:
    """An application and its sockets. The first signal lets running requests finish and refuses new ones."""

    def __init__(self, checkpoints: Mapping[str, Checkpoint], settings: Settings) -> None:
        self.application = Application(checkpoints, settings)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Begin to end; the second call ends at once."""
        application = self.application
        if application.draining:
            application.end_all()
            self._ended.set()
            return
        application.draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for the running requests, at most the grace period; then end them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.application.settings.grace):
                while self.application.active:
                    await asyncio.sleep(0.02)
        self.application.end_all()
        self._ended.set()

    async def run(self, listeners: list[socket.socket], say: Callable[[str], None]) -> None:
        """Serve until end() is called or an engine cannot be opened."""
        self.loop = loop = asyncio.get_running_loop()
        scheduler = self.application.scheduler
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # tests serve in a thread, which has no signals
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self.end))

        async def announce() -> None:
            await scheduler.loaded.wait()
            if scheduler.error:
                self._ended.set()
            elif not self.application.draining:
                say("Ready. Ctrl-C ends it.")

        scheduler.start()
        application: Any = receiving(self.application.asgi)
        calls = (
            serve_http(application, configured(listeners), shutdown_trigger=self._ended.wait),
            self._ended.wait(),
            announce(),
        )
        http, ended, announced = map(asyncio.create_task, calls)
        await asyncio.wait((http, ended), return_when=asyncio.FIRST_COMPLETED)
        loop.set_exception_handler(lambda loop, context: None)  # asyncio would log connections that are cut
        await asyncio.wait((http,), timeout=2 * END_SECONDS)
        if http.done():
            http.result()  # raises its error
        if scheduler.loaded.is_set():  # else its thread waits for a compiler and ends with the process
            await scheduler.stop()
        # First what the tasks do is cancelled, then their wait for a reader that takes nothing.
        for _ in range(2):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                for task in others:
                    task.cancel()
                await asyncio.wait(others, timeout=END_SECONDS)


def receiving(app: ASGIApp) -> ASGIApp:
    """An application that takes each message at once: hypercorn closes no connection while its queue is full.

    The queue's few places let other connections take turns with a body of many small chunks.
    """
    tasks: set[asyncio.Task[None]] = set()  # asyncio itself does not keep them

    async def take(receive: Receive, messages: asyncio.Queue[Message]) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":  # hypercorn sends it at the end of each request
            message = await receive()
            messages.put_nowait(message)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            messages: asyncio.Queue[Message] = asyncio.Queue()
            task = asyncio.create_task(take(receive, messages))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            receive = messages.get
        await app(scope, receive, send)

    return call


def configured(listeners: list[socket.socket]) -> Config:
    """hypercorn's settings. It takes the listeners over."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}" for listener in listeners]
    config.loglevel = "WARNING"
    config.include_server_header = False
    config.h11_max_incomplete_size = HEAD_BYTES  # of HTTP/2 it is the default
    config.keep_alive_timeout = HEAD_SECONDS
    config.graceful_timeout = END_SECONDS  # the running requests have ended already
    config.backlog = BACKLOG
    return config


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


def allow_connections() -> None:
    """Let the process open FILES, or as many as the system allows."""
    if sys.platform != "win32":  # which has no such limit
        import resource

        files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FILES if hard_limit == resource.RLIM_INFINITY else min(FILES, hard_limit)
        if files < wanted:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard_limit))


def serve(server: Server, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Serve until a signal comes. Raises the error that kept an engine from opening."""
    settings = server.application.settings
    listeners = [listener]
    if settings.host == LOCALHOST:  # programs may take it for ::1
        with suppress(OSError):  # there is no IPv6, or another program has the port
            listeners.append(bind(replace(settings, host="::1", port=listener.getsockname()[1])))
    allow_connections()
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(server.run(listeners, say))
    error = server.application.scheduler.error
    if error:
        raise error


def fast_loop() -> Any:
    """What makes uvloop's event loop, or None for Python's where it is missing."""
    with suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None
