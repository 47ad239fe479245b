"""What is checked before a route: the API key and the size of the body; and the open requests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, respond
from .settings import ServerSettings

API_KEY_VARIABLE = "LLM_LADDER_API_KEY"
OPEN_PATHS = ("/health", "/")  # a load balancer has no key; the live page asks for it
RETRY_AFTER = {"Retry-After": "1"}  # seconds
MOST_DISCARDED = 64 << 20  # bytes of a body that is too large
LINGER = 2.0  # seconds


class OpenRequests:
    """Counts the requests that wait or run, and refuses those that are too many.

    A request counts from its arrival, before its prompt is tokenized.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self.is_draining = False

    @contextmanager
    def place_for(self, count: int) -> Iterator[None]:
        """Hold places for that many requests. Raises `ApiError` if there are not enough."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if count > self.most:
            raise ApiError(400, f"this call needs {count} requests; the limit is {self.most}")
        if self.count + count > self.most:
            raise ApiError(
                429, f"{self.count} requests wait or run, the limit is {self.most}: try later",
                code="queue_full", headers=RETRY_AFTER,
            )  # fmt: skip
        self.count += count
        try:
            yield
        finally:
            self.count -= count


class Guard:
    """ASGI middleware that refuses calls without the API key, and bodies that are too large.

    The application gets a call when its body is complete, so a slow client holds no engine request.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        key = settings.api_key or os.environ.get(API_KEY_VARIABLE)
        self._key = None if key is None else key.encode()
        self._buffered = 0  # bytes of the bodies of all open calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        try:
            is_whole = await self._read_or_refuse(body, scope, receive, send)
            if is_whole:  # otherwise, it is refused, or the client is gone
                await self.app(scope, replayed(bytes(body), receive), send)
        finally:
            self._buffered -= len(body)

    async def _read_or_refuse(
        self, body: bytearray, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        headers = Headers(scope=scope)
        try:
            self._check_key(scope["path"], headers)
            return await self._read(headers, receive, body)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return False

    def _check_key(self, path: str, headers: Headers) -> None:
        """Raise `ApiError` for a wrong key. The comparison takes the same time for all keys."""
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = secrets.compare_digest(given.encode(), self._key)
        if not right or scheme.lower() != "bearer":
            raise ApiError(
                401, "wrong or missing API key: send the header Authorization: Bearer <key>",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    async def _read(self, headers: Headers, receive: Receive, body: bytearray) -> bool:
        """Read the whole body. Return False if the client closes the connection before its end."""
        most = self.settings.max_body_bytes
        too_large = ApiError(413, f"the body must have at most {most} bytes")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_large
        try:
            with anyio.fail_after(self.settings.body_timeout):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    self._buffered += len(message.get("body", b""))
                    if len(body) > most:
                        raise too_large
                    if self._buffered > self.settings.max_buffered_bytes:
                        raise ApiError(
                            503, "the bodies of all calls together are too large: try later",
                            code="too_many_bytes", headers=RETRY_AFTER,
                        )  # fmt: skip
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            limit = f"{self.settings.body_timeout:g} seconds"
            raise ApiError(408, f"the body did not arrive within {limit}") from None
        return False


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what comes next."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error before the body has been read, and then discard the body.

    If the server closed the connection at once, a client that still sends would get a reset instead
    of the answer.
    """
    response = respond(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})
    discarded = 0
    with anyio.move_on_after(LINGER):
        while discarded < MOST_DISCARDED:
            message = await receive()
            discarded += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
    await send({"type": "http.response.body", "body": b""})
