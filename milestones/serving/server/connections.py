"""`Connection`: a connection of uvicorn with limits for clients that send or read nothing.

A connection without a call holds a socket and nothing else. So it must send the header of its
first call in time, and when there are too many connections, those that have waited longest without
a call are closed. A client that does not read its answer is cut off.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError
from .limits import RETRY_AFTER, refuse
from .settings import ServerSettings


class Connection(H11Protocol):
    """One connection of a client. A subclass has the settings."""

    settings: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._app: ASGIApp = self.app
        self.app = self._call
        self._header_due: asyncio.TimerHandle | None = None
        self.waits_since = time.monotonic()  # for a call

    @property
    def has_call(self) -> bool:
        """Return whether a call has arrived and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_header()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._header_due is not None:
            self._header_due.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.waits_since = time.monotonic()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a new call; it cannot wait for a client that reads nothing."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.settings.write_timeout, self.transport.abort)

    def _watch_header(self) -> None:
        """Let the time of a header run from its first byte, and of the first one from the start."""
        if self.conn.their_state is not h11.IDLE:
            if self._header_due is not None:
                self._header_due.cancel()
                self._header_due = None
        elif self._header_due is None:
            self._header_due = self.loop.call_later(
                self.settings.header_timeout, self.transport.abort
            )

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a call, if there are too many."""
        if len(self.connections) <= self.settings.max_connections:
            return
        others = [c for c in self.connections if isinstance(c, Connection) and c is not self]
        waiting = [connection for connection in others if not connection.has_call]
        if waiting:
            min(waiting, key=lambda connection: connection.waits_since).transport.abort()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call. Its answer is cut off if the client does not read it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            with anyio.move_on_after(self.settings.write_timeout) as limit:
                await send(message)
            if limit.cancelled_caught:
                self.transport.abort()

        calls = sum(c.has_call for c in self.connections if isinstance(c, Connection))
        if calls > self.settings.max_connections and scope["path"] != "/health":
            error = ApiError(
                503, f"{self.settings.max_connections} connections have a call, which is the "
                "limit: try later", code="too_many_connections", headers=RETRY_AFTER,
            )  # fmt: skip
            await refuse(error, scope, receive, send_in_time)
            return
        await self._app(scope, receive, send_in_time)


def connection_class(settings: ServerSettings) -> type[Connection]:
    """Return the class of the connections of a server with these settings."""
    return type("Connection", (Connection,), {"settings": settings})
