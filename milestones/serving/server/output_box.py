"""`OutputBox`: the newest outputs of one API call, between the engine's thread and a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from common import RequestOutput


class OutputBox:
    """The outputs of the engine requests of one API call that its task has not taken yet.

    Outputs are cumulative, so a newer output replaces the older one of the same request. A box
    holds at most one output for each request, however slowly the client reads. All methods are for
    the event loop's thread.
    """

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.unfinished = set(request_ids)
        self._newest: dict[str, RequestOutput] = {}
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. It replaces the one of the same request that waits here."""
        if output.finished:
            self.unfinished.discard(output.request_id)
        self._newest[output.request_id] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the task, if its requests have not all finished."""
        if self.unfinished:
            self._failure = error
            self._changed.set()

    async def outputs(self) -> AsyncIterator[list[RequestOutput]]:
        """Yield new outputs as they come, until all requests have finished."""
        while self.unfinished or self._newest:
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            newest, self._newest = self._newest, {}
            if newest:
                yield list(newest.values())
