"""`Generation`: one API call from its prompts to its answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from common import CompletionOutput, EngineDeadError, RequestOutput, SamplingParams, TokensPrompt

from .engine_thread import EngineRequest, EngineThread, OutputBox
from .errors import ApiError, Json, api_error, not_computed
from .formats import Body, Format, usage

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # no client reads it; the log shows it
T = TypeVar("T")


class Generation:
    """The engine requests of one API call, and their answer.

    Choice i * n + j is output j of prompt i. The stack holds what the call must give back: its
    place among the open requests, and its box. It is closed when the answer ends, in any way.
    """

    def __init__(self, engine: EngineThread, form: Format, num_choices: int) -> None:
        self.engine = engine
        self.form = form
        self.num_choices = num_choices  # of each prompt
        self.resources = ExitStack()
        self.ids: list[str] = []
        self.newest: dict[str, RequestOutput] = {}

    async def admit(
        self,
        prompts: Sequence[TokensPrompt],
        params: SamplingParams,
        arrival_time: float,
        options: Mapping[str, Any],
    ) -> None:
        """Queue the prompts in the engine. Raises what the engine raises for a bad one."""
        self.ids = [f"{self.form.call_id}-{i}" for i in range(len(prompts))]
        box = await self.engine.open(
            [EngineRequest(i, p, params, arrival_time, options) for i, p in zip(self.ids, prompts)]
        )
        self.resources.callback(self.engine.close, box)
        self.box: OutputBox = box

    async def whole(self, request: Request) -> Response:
        """Return the answer when it is complete. If the client goes away, abort."""
        with self.resources:
            if not await unless_gone(request, self._finish):
                return Response(status_code=CLIENT_GONE)
            outputs = [self.newest[request_id] for request_id in self.ids]
            choices = [completion for output in outputs for completion in output.outputs]
            body = await self._made(lambda: self.form.whole(choices, usage(outputs)))
            return Json(body)

    def stream(self, with_usage: bool, *, so_far: bool) -> Response:
        """Return the answer as server-sent events. so_far: each one has the usage up to it."""
        return EventStream(self._events(with_usage, so_far), self.resources)

    async def _finish(self) -> bool:
        async for outputs in self.box.outputs():
            self._keep(outputs)
        return True

    async def _events(self, with_usage: bool, so_far: bool) -> AsyncIterator[str]:
        """Yield events. An error is the last event: its status line has been sent long ago."""
        extra: Body = {"usage": None} if with_usage else {}
        choices = [Choice(i) for i in range(len(self.ids) * self.num_choices)]
        try:
            for choice in choices:
                if (chunk := self.form.first_chunk(choice.index)) is not None:
                    yield event({**chunk, **extra})
            async for outputs in self.box.outputs():
                self._keep(outputs)
                if so_far:
                    extra = {"usage": usage([*self.newest.values()])}
                for request_id in (output.request_id for output in outputs):
                    first = self._first_choice(request_id)
                    for choice, completion in zip(choices[first:], self.newest[request_id].outputs):
                        if (delta := choice.advance(completion)) is not None:
                            made = functools.partial(self.form.chunk, choice.index, delta)
                            yield event({**await self._made(made), **extra})
            if with_usage:
                yield event(self.form.usage_chunk(usage([self.newest[i] for i in self.ids])))
            yield "data: [DONE]\n\n"
        except (ApiError, EngineDeadError) as error:
            yield event(api_error(error).body())
        except Exception:
            logger.exception("a stream failed")
            yield event(ApiError(500, "the server failed").body())

    async def _made(self, make: Callable[[], Body]) -> Body:
        return await asyncio.to_thread(make) if self.form.is_slow else make()

    def _keep(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep the newest outputs. Raises `ApiError` if one of them failed."""
        for output in outputs:
            for completion in output.outputs:
                if completion.finish_reason in ("error", "abort"):
                    raise not_computed(completion.error)
            first = self._first_choice(output.request_id)
            self.newest[output.request_id] = self.form.received(first, output)

    def _first_choice(self, request_id: str) -> int:
        return self.ids.index(request_id) * self.num_choices


class Choice:
    """What a client has of one choice. Outputs are cumulative, deltas are not.

    The text of a token may come in a later delta than its log probability, because half a character
    is held back.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_finished = False
        self._num_characters = 0
        self._num_tokens = 0

    def advance(self, output: CompletionOutput) -> CompletionOutput | None:
        """Return what is new in the newest output; None if a client would not notice it."""
        if self.is_finished:
            return None
        new = slice(self._num_tokens, None)
        delta = replace(
            output,
            text=output.text[self._num_characters :],
            token_ids=output.token_ids[new],
            logprobs=None if output.logprobs is None else output.logprobs[new],
        )
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return None
        self._num_characters = len(output.text)
        self._num_tokens = len(output.token_ids)
        self.is_finished = delta.finish_reason is not None
        return delta


class EventStream(StreamingResponse):
    """Server-sent events. If the client goes away, Starlette cancels the stream.

    The stack is closed at the end in any case, even if the stream was cancelled before its start.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], resources: ExitStack) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            await super().__call__(scope, receive, send)


def event(body: Body) -> str:
    """Return a server-sent event. ASCII only: all line breaks of a text are escaped."""
    return f"data: {json.dumps(body, allow_nan=False, separators=(',', ':'))}\n\n"


async def unless_gone(
    request: Request,
    function: Callable[[], Awaitable[T]],
    ended: asyncio.Future[None] | None = None,
) -> T | None:
    """Return the result of `function()`; None as soon as the client has closed the connection.

    ended: a future that has an exception as soon as this call must end. It is raised here.
    """
    work = asyncio.ensure_future(function())
    gone = asyncio.ensure_future(disconnected(request.receive))
    waited_for: list[asyncio.Future[Any]] = [work, gone, *([] if ended is None else [ended])]
    try:
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if ended is not None and ended.done():
            ended.result()
        return None
    finally:
        work.cancel()
        gone.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def now() -> float:
    """Return the time in the clock of the engine's metrics."""
    return time.perf_counter()
