"""A cheap client of OpenAI's API: raw bytes over asyncio; tokens are counted by `usage`, not by events."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import time
from dataclasses import dataclass

WRITTEN = re.compile(rb'"completion_tokens": ?(\d+)')
TEXT = (b'"text":', b'"content":')


@dataclass
class Answer:
    """A stream's outcome. seconds: to its end. first: seconds to its first text."""

    status: int
    tokens: int
    first: float
    seconds: float
    events: int
    data: bytes


class Connection(asyncio.Protocol):
    """A persistent connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[bytes] | None = None
        self._chunks: list[bytes] = []
        self._first = 0.0
        self._tail = b""

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._first and any(text in data for text in TEXT):
            self._first = time.perf_counter()
        self._chunks.append(data)
        self._tail = (self._tail + data[-7:])[-7:]  # the last chunk may come in pieces
        if self._tail == b"\r\n0\r\n\r\n" or b"content-length" in self._chunks[0].lower():
            self._finish()

    def connection_lost(self, error) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        if self._done and not self._done.done():
            self._done.set_exception(error or ConnectionError("closed"))

    def _finish(self) -> None:
        data = b"".join(self._chunks)
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if length and len(body) < int(length[1]):
            return
        if self._done and not self._done.done():
            self._done.set_result(data)

    async def ask(self, path: str, body: dict) -> Answer:
        """Send a request and read all of the answer."""
        assert self.transport
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._chunks, self._first, self._tail = [], 0.0, b""
        self._done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self.transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        data = await self._done
        end = time.perf_counter()
        usage = WRITTEN.findall(data)
        tokens = int(usage[-1]) if usage else 0
        status = int(data[9:12])
        return Answer(status, tokens, self._first - start, end - start, data.count(b"data: "), data)


class Client:
    """Asks a server on this machine, over one connection while the server keeps it open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection: Connection | None = None

    async def ask(self, path: str, body: dict) -> Answer:
        """Send a request and read all of the answer."""
        if self._connection and not self._connection.closed.done():
            try:
                return await self._connection.ask(path, body)
            except ConnectionError:  # some servers close it after a stream
                pass
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        return await self._connection.ask(path, body)

    async def stream(self, path: str, body: dict) -> Answer:
        """The same with a streaming request."""
        return await self.ask(path, body | {"stream": True, "stream_options": {"include_usage": True}})

    def close(self) -> None:
        """Close the connection."""
        if self._connection and self._connection.transport:
            self._connection.transport.close()


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
