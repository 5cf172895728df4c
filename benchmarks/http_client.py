"""A client of OpenAI's API that costs little: raw bytes over asyncio, tokens by `usage`, never by events."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import time
from dataclasses import dataclass

USAGE = re.compile(rb'"usage": ?(\{[^{}]*\})')
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
    """A connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[bytes] | None = None
        self._chunks: list[bytes] = []
        self._first = 0.0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._first and any(text in data for text in TEXT):
            self._first = time.perf_counter()
        self._chunks.append(data)
        if data.endswith(b"0\r\n\r\n") or b"content-length" in self._chunks[0].lower():
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

    async def stream(self, path: str, body: dict) -> Answer:
        """Send a streaming request and read all of it."""
        assert self.transport
        content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._chunks, self._first = [], 0.0
        self._done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self.transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        data = await self._done
        end = time.perf_counter()
        usage = [json.loads(found) for found in USAGE.findall(data)]
        tokens = usage[-1]["completion_tokens"] if usage else 0
        status = int(data[9:12])
        return Answer(status, tokens, self._first - start, end - start, data.count(b"data: "), data)


async def connect(port: int) -> Connection:
    """A new connection to a server on this machine."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


def cpu_seconds() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
