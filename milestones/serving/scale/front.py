"""`Front`: the server that clients see. It forwards each call to a replica, and the answer back.

    client ──> Guard ──> Front.forward ──> PromptKeys ──> Replicas.answer ──> a replica
                              ^                                  |
                              +── head, pieces of the body, tail +

A call is sent again if its replica dies before anything of the answer has reached the client. After
that, a stream ends with an error event. So each call has one answer, and each answer has an end.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..server.errors import ApiError, Json
from ..server.limits import Guard, OpenRequests
from ..server.settings import ServerSettings
from .answer import Answer, Calls, Replicas
from .merge import merged_pages
from .prompt_keys import PromptKeys
from .wire import ForwardedCall

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


class Front:
    """Forwards calls. `is_draining` of `open` refuses new ones, as in the server of one engine."""

    def __init__(self, replicas: Replicas, settings: ServerSettings, keys: PromptKeys) -> None:
        self.replicas = replicas
        self.open = OpenRequests(settings.max_open_requests)
        self.calls = Calls(replicas, self.open)
        self._settings = settings
        self._keys = keys
        self._numbers = itertools.count(1)

    async def forward(self, request: Request) -> Response:
        """Return the answer to a call, which will be read from a replica."""
        num_replicas = max(1, len(self.replicas.balancer.names))
        self.open.most = self._settings.max_open_requests * num_replicas
        path, body = request.url.path, await request.body()
        call = ForwardedCall(
            next(self._numbers),
            request.method,
            path,
            request.scope["query_string"],
            tuple(request.headers.raw),
            body,
            await self._keys.of(path, body),
        )
        return Answer(self.calls, call)

    async def health(self, request: Request) -> Response:
        """Answer `/health`: 200 if at least one replica is there."""
        if self.open.is_draining:
            return Json({"status": "draining"}, 503)
        names = self.replicas.balancer.names
        return Json({"status": "ok" if names else "no replica runs"}, 200 if names else 503)

    async def state(self, request: Request) -> Response:
        """Answer `/replicas`: what the router knows about each replica."""
        balancer = self.replicas.balancer
        loads, sent = balancer.loads, balancer.sent
        found = await self.replicas.descriptions()
        rows = [
            {
                "name": one.replica, "pid": one.pid, "num_pages": one.num_pages,
                "load": loads.get(one.replica, 0), "sent": sent.get(one.replica, 0),
            }
            for one in found
        ]  # fmt: skip
        return Json({"replicas": rows, "retried": self.calls.retried})

    async def metrics(self, request: Request) -> Response:
        """Answer `/metrics`: the pages of all replicas, with a label for the replica."""
        page = merged_pages(await self.replicas.metrics(), self.replicas.balancer.loads)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def end_all(self, error: ApiError) -> None:
        """End all answers with an error."""
        for answer in [*self.calls.answers]:
            answer.fail(error)

    def app(self) -> Starlette:
        """Return the application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self._keys.stop()

        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/replicas", self.state),
                Route("/{path:path}", self.forward, methods=METHODS),
            ],
            middleware=[Middleware(Guard, settings=self._settings)],
            lifespan=lifespan,
        )
