"""A request whose texts are being written, as the event loop sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from app.server.choices import Choice, Piece
from app.server.errors import ApiError
from app.server.plan import Plan


class Call:
    """A request's choices, and the pieces of them that the scheduler has sent to the event loop.

    buffer_bytes: the most bytes of pieces that may wait to be sent. If more wait for behind_seconds, the
    reader is too slow and `overflowed` is called. The event loop owns all fields but `choices`.
    """

    def __init__(self, plan: Plan, buffer_bytes: int, behind_seconds: float) -> None:
        self.plan = plan
        self.choices = [Choice(plan, number) for number in range(len(plan.requests))]
        self.began = time.monotonic()
        self.gone = False  # the client has left or was dropped
        self.overflowed: Callable[[], None] = lambda: None
        self._buffer_bytes, self._behind_seconds = buffer_bytes, behind_seconds
        self._behind: asyncio.TimerHandle | None = None  # runs while more than buffer_bytes wait
        self._inbox: list[Piece] = []
        self._held = 0  # bytes in it
        self._error: ApiError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, piece: Piece | ApiError) -> None:
        """Append a piece, or the error that ends the request."""
        if isinstance(piece, ApiError):
            self._error = piece
        else:
            self._inbox.append(piece)
            if self.plan.stream:
                self._held += piece.bytes
                # A single batch may be larger; a reader that is fast enough has it at once.
                if self._held > self._buffer_bytes and not (self._behind or self.gone):
                    loop = asyncio.get_running_loop()
                    self._behind = loop.call_later(self._behind_seconds, lambda: self.overflowed())
        self._wake()

    def leave(self) -> None:
        """Note that the client has left or has everything."""
        self.gone = True
        self._in_time()
        self._wake()

    async def pieces(self) -> list[Piece]:
        """Wait for pieces and return all; none if the client has left. Raises the ApiError that ended it."""
        if not (self._inbox or self._error or self.gone):
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self.gone:
            return []
        if self._error:
            raise self._error
        taken, self._inbox, self._held = self._inbox, [], 0
        self._in_time()
        return taken

    def _in_time(self) -> None:
        if self._behind:
            self._behind.cancel()
            self._behind = None

    def _wake(self) -> None:
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)
