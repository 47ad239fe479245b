"""`Answer`: the answer of a replica, passed on to the client as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..server.errors import ApiError, api_error, respond
from ..server.generation import disconnected, event
from ..server.limits import OpenRequests
from .balancer import Balancer
from .wire import Description, ForwardedCall, Head, Headers, Item, ReplicaDiedError, Tail

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 4  # of one call, with a replica that dies in each but the last
LAST_EVENT = b"data: [DONE]\n\n"  # of a stream without an error
LAST_MESSAGE = {"type": "http.response.body", "body": b""}


class Replicas(Protocol):
    """The replicas behind a front. The balancer chooses among them."""

    balancer: Balancer

    def answer(self, call: ForwardedCall) -> AsyncGenerator[Item, None]:
        """Yield the answer of one replica. Raises `ReplicaDiedError`."""
        ...

    async def descriptions(self) -> Sequence[Description]:
        """Return those of all replicas that run."""
        ...

    async def metrics(self) -> Sequence[tuple[str, str]]:
        """Return the name and the page for Prometheus of all replicas that run."""
        ...


@dataclass
class Calls:
    """The calls of a front: the replicas that answer them, and those that are open.

    retried: the number of times that a call was sent again.
    """

    replicas: Replicas
    open: OpenRequests
    retried: int = 0
    answers: set[Answer] = field(default_factory=set)


class Answer(Response):
    """The answer to one call. It is sent again if a replica dies before anything was sent."""

    def __init__(self, calls: Calls, call: ForwardedCall) -> None:
        self.background = None
        self._calls = calls
        self._call = call
        self._head: Head | None = None
        self._is_started = False  # something of the answer has been sent to the client
        self._is_whole = False  # all of it has been sent
        self._num_sent = 0  # bytes of the body
        self._error: ApiError | None = None
        self._work: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. If the client goes away, the replica is told."""
        try:
            with self._calls.open.place_for(1):
                self._calls.answers.add(self)
                await self._relay_unless_gone(receive, send)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("an answer failed")
            await self._end(api_error(error), scope, receive, send)
        finally:
            self._calls.answers.discard(self)

    def fail(self, error: ApiError) -> None:
        """End the answer with an error."""
        self._error = error
        if self._work is not None:
            self._work.cancel()

    async def _relay_unless_gone(self, receive: Receive, send: Send) -> None:
        self._work = asyncio.create_task(self._relay(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((self._work, gone), return_when=asyncio.FIRST_COMPLETED)
            if self._is_whole:  # the client may go. The replica's report is still to come
                await asyncio.wait((self._work,))
        finally:
            gone.cancel()
            if not self._work.done():
                self._work.cancel()
            await asyncio.wait((self._work,))  # the replica has been told before the place is free
        if self._error is not None:
            raise self._error
        if not self._work.cancelled():
            self._work.result()

    async def _relay(self, send: Send) -> None:
        for _ in range(MOST_ATTEMPTS):
            try:
                await self._relay_once(send)
                return
            except ReplicaDiedError:
                if self._is_whole:  # only the report is lost
                    await send(LAST_MESSAGE)
                    return
                if self._is_started:
                    break
                self._calls.retried += 1
                self._head = None
        raise ApiError(502, "the replica that computed this answer has died", code="replica_died")

    async def _relay_once(self, send: Send) -> None:
        is_complete = False
        call = replace(self._call, seen=self._calls.replicas.balancer.reported())
        async with aclosing(self._calls.replicas.answer(call)) as items:
            async for item in items:
                if isinstance(item, Head):
                    self._head = item
                elif isinstance(item, bytes):
                    await self._start(send)
                    self._num_sent += len(item)
                    self._is_whole = self._ends_with(item)
                    await send({"type": "http.response.body", "body": item, "more_body": True})
                else:
                    assert isinstance(item, Tail)
                    is_complete = True
                    if item.report is not None:
                        self._calls.replicas.balancer.report(item.replica, item.report)
        if not is_complete:
            raise ReplicaDiedError(self._head.replica if self._head else None)
        await self._start(send)
        await send(LAST_MESSAGE)

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            assert self._head is not None, "a replica sends the head first"
            self._is_started = True
            await send(start(self._head.status, self._head.headers))

    def _ends_with(self, item: bytes) -> bool:
        """Return whether an answer ends with this piece."""
        assert self._head is not None
        length = dict(self._head.headers).get(b"content-length")
        return item.endswith(LAST_EVENT) if length is None else self._num_sent >= int(length)

    async def _end(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client: by a status, by the last event of a stream, or by a broken body."""
        if not self._is_started:
            await respond(error)(scope, receive, send)
            return
        assert self._head is not None
        if self._is_whole:  # an error after the whole answer would be a second end
            await send(LAST_MESSAGE)
            return
        if dict(self._head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            last = event(error.body()).encode()
            await send({"type": "http.response.body", "body": last, "more_body": True})
            await send(LAST_MESSAGE)
            return
        raise error  # uvicorn closes the connection before the end of the body


def start(status: int, headers: Headers) -> dict[str, object]:
    """Return the message that begins an answer."""
    return {"type": "http.response.start", "status": status, "headers": list(headers)}
