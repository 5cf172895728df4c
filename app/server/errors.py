"""Errors in OpenAI's format."""

from __future__ import annotations

import json
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

SLICE_BYTES = 65_536  # bytes of a body that are sent before waiting for the reader


@dataclass
class ApiError(Exception):
    """A refusal. The client gets {"error": {"message", "type", "param", "code"}}.

    param: the wrong field. code: a word for programs. headers: additional headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def type(self) -> str:
        """OpenAI's type of the error, which says whose mistake it is."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The response's JSON."""
        shown = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": shown}).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it as the response."""
        await respond(send, self.status, self.body(), headers=self.headers)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: tuple[tuple[str, str], ...] = (),
) -> None:
    """Send a whole response."""
    all_headers = (("content-type", content_type), ("content-length", str(len(body))), *headers)
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in all_headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send_body(send, body)


async def send_body(send: Send, body: bytes, more: bool = False) -> None:
    """Send a part of a body and wait while its reader is slow. more: whether another part follows."""
    for start in range(0, max(len(body), 1), SLICE_BYTES):
        end = start + SLICE_BYTES
        part = {"body": body[start:end], "more_body": more or end < len(body)}
        await send({"type": "http.response.body", **part})
