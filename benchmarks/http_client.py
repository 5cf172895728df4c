"""A cheap client of OpenAI's API: raw bytes over asyncio; tokens are counted by `usage`, not by events."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass

WRITTEN = re.compile(rb'"completion_tokens": ?(\d+)')
LENGTH = re.compile(rb"content-length: (\d+)", re.I)
TEXT = (b'"text":', b'"content":')


@dataclass
class Answer:
    """What a server answered. tokens: as `usage` says. first: seconds to the first text."""

    status: int
    tokens: int
    first: float
    data: bytes


class Client(asyncio.Protocol):
    """Asks a server on this machine, one request at a time, over one connection while that stays open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._data, self._first = bytearray(), 0.0

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._first and any(text in data for text in TEXT):
            self._first = time.perf_counter()
        self._data += data
        head = self._data.find(b"\r\n\r\n") + 4
        length = LENGTH.search(self._data, 0, head)
        whole = len(self._data) >= head + int(length[1]) if length else self._data.endswith(b"\r\n0\r\n\r\n")
        if whole and self._done and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error) -> None:
        self._transport = None
        if self._done and not self._done.done():
            self._done.set_exception(error or ConnectionError("closed"))

    async def ask(self, path: str, body: dict) -> Answer:
        """Send a request and read all of the answer."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        if self._transport:
            try:
                return await self._answer(self._transport, request)
            except ConnectionError:  # some servers close it after a stream
                pass
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self, "127.0.0.1", self.port
        )
        return await self._answer(transport, request)

    async def _answer(self, transport: asyncio.Transport, request: bytes) -> Answer:
        self._data, self._first = bytearray(), 0.0
        self._done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        transport.write(request)
        await self._done
        usage = WRITTEN.findall(self._data)
        tokens = int(usage[-1]) if usage else 0
        return Answer(int(self._data[9:12]), tokens, self._first - start, bytes(self._data))

    async def stream(self, path: str, body: dict) -> Answer:
        """The same with a streaming request."""
        return await self.ask(path, body | {"stream": True, "stream_options": {"include_usage": True}})

    def close(self) -> None:
        """Close the connection."""
        if self._transport:
            self._transport.close()
