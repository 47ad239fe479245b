"""`Page`: one open page, with its chats and its crowd; `Recorder`: one recording for all of them.

    engine thread   step --> LiveTrace: the newest steps       join and leave: between two steps
                                 ^
    event loop                 pages

Each page reads the steps that it does not have yet, at its own speed. Without a page, nothing is
recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common import EngineDeadError, LLMEngine, SamplingParams
from common.displays.demo import CHATS, machine
from common.tracing.data import TraceData
from common.tracing.live import LiveTrace

from ..engine_thread import EngineRequest, EngineThread, OutputBox
from ..errors import ApiError, api_error
from ..generation import event, now
from ..limits import OpenRequests
from ..prompts import PromptReader

INTERVAL = 0.05  # seconds between two events, at least
THINKING = 1.0  # seconds on average until a user of the crowd asks again
FOLLOW_UP = "Say the same in one short sentence."
Body = dict[str, Any]
Message = dict[str, str]


class Recorder:
    """Opens the trace when the first page joins, and closes it when the last one leaves."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._pages: set[str] = set()  # only the engine's thread uses it
        self._trace: LiveTrace | None = None

    @property
    def is_recording(self) -> bool:
        return self._trace is not None

    async def join(self, page: str) -> TraceData:
        """Add a page, or let it begin again. Return the current state; `since` continues it."""
        try:
            return await self._engine.call(lambda engine: self._join(engine, page))
        except BaseException:  # the engine is dead, or the page is gone
            self.leave(page)
            raise

    def leave(self, page: str) -> None:
        """Remove a page."""
        self._engine.post(lambda engine: self._leave(page))

    def since(self, step: int) -> TraceData | None:
        """Return the steps after `step`; None if a page that is so far behind must join again."""
        trace = self._trace
        return None if trace is None else trace.since(step)

    def end(self) -> None:
        """Close the trace, even if a page is open. The engine's thread must have ended."""
        self._pages.clear()
        self._close()

    def _join(self, engine: LLMEngine, page: str) -> TraceData:
        if self._trace is None:
            trace = LiveTrace(engine)
            trace.data.meta["machine"] = machine()
            self._trace = trace.__enter__()
        self._pages.add(page)
        return self._trace.snapshot()

    def _leave(self, page: str) -> None:
        self._pages.discard(page)
        if not self._pages:
            self._close()

    def _close(self) -> None:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None


@dataclass(frozen=True)
class Shared:
    """What the pages use of the server. ids: the numbers of pages, chats and users."""

    engine: EngineThread
    prompts: PromptReader
    open: OpenRequests
    recorder: Recorder
    ids: itertools.count[int]


class Page:
    """The requests of one open page. They are aborted when the page is closed.

    All methods are for the event loop's thread.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.name = f"page-{next(shared.ids)}"
        self.begins_again = False  # the page wants a new snapshot
        self.is_closed = False
        self.crowd = {"users": 0, "refused": 0}
        self._sent = dict(self.crowd)
        self._answers: list[Body] = []  # of chats; not sent yet
        self._results: dict[str, Body] = {}  # of requests that are open
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request
        self._users: set[asyncio.Task[None]] = set()
        self._crowd: asyncio.Task[None] | None = None

    async def ask(self, messages: list[Message], params: SamplingParams) -> str:
        """Add a request of a chat, and return its id. The page gets an event when it ends.

        Raises what the API raises for a bad request.
        """
        request_id, task = await self._add("ask", messages, params)
        task.add_done_callback(lambda _: self._answers.append(self._results.pop(request_id)))
        return request_id

    def stop(self, request_id: str) -> bool:
        """Abort a request of this page, if it is open."""
        task = self._tasks.get(request_id)
        return task is not None and task.cancel()

    def set_crowd(self, rate: float, system: str, params: SamplingParams) -> None:
        """Let `rate` simulated users per second arrive from now on. Earlier users go on."""
        if self._crowd is not None:
            self._crowd.cancel()
        self._crowd = None
        if rate:
            self._crowd = asyncio.create_task(self._arrivals(rate, system, params))

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of the page: first the current state, then the steps as they come."""
        try:
            yield event(await self._begin())
            while not self.is_closed:
                await asyncio.sleep(INTERVAL)
                body = await self._begin() if self.begins_again else await self._news()
                if body:
                    yield event(body)
        except (ApiError, EngineDeadError) as error:
            yield event(api_error(error).body())

    def close(self) -> None:
        """Abort the requests, stop watching, and end the events."""
        self.is_closed = True
        if self._crowd is not None:
            self._crowd.cancel()
        for task in [*self._users, *self._tasks.values()]:
            task.cancel()
        self.shared.recorder.leave(self.name)

    async def _begin(self) -> Body:
        self.begins_again = False
        snapshot = await self.shared.recorder.join(self.name)
        self._step = snapshot.frames[0].step
        return {"page": self.name, "begin": snapshot.as_json(), **self._ends()}

    async def _news(self) -> Body:
        """Return what the page does not have yet; nothing if there is nothing new."""
        if not self.shared.engine.is_alive:
            raise self.shared.engine.dead()
        trace = self.shared.recorder.since(self._step)
        if trace is None:  # the page is so slow that its next steps are no longer kept
            return await self._begin()
        body = self._ends()
        if trace.frames:
            self._step = trace.frames[-1].step
            body["steps"] = trace.rows()
        return body

    def _ends(self) -> Body:
        """Return the answers that have ended, and the numbers of the crowd if they changed."""
        answers, self._answers = self._answers, []
        body: Body = {"answers": answers} if answers else {}
        if self.crowd != self._sent:
            body["crowd"] = self._sent = dict(self.crowd)
        return body

    async def _add(
        self, kind: str, messages: list[Message], params: SamplingParams
    ) -> tuple[str, asyncio.Task[None]]:
        """Add a request. Return its id, and the task that waits for its end."""
        arrival_time = now()
        with ExitStack() as resources:
            resources.enter_context(self.shared.open.place_for(1))
            prompt = await self.shared.prompts.read_chat(messages)
            request_id = f"{kind}-{next(self.shared.ids)}"
            request = EngineRequest(request_id, prompt, params, arrival_time)
            box = await self.shared.engine.open([request])
            resources.callback(self.shared.engine.close, box)
            if self.is_closed:  # while the prompt was read
                raise ApiError(404, f"the page {self.name!r} is not open", param="page")
            result = {"id": request_id, "text": "", "reason": "abort", "error": None}
            task = asyncio.create_task(self._follow(result, box))
            held = resources.pop_all()
        self._results[request_id], self._tasks[request_id] = result, task

        def ended(task: asyncio.Task[None]) -> None:  # even if it was cancelled before its start
            held.close()
            del self._tasks[request_id]

        task.add_done_callback(ended)
        return request_id, task

    async def _follow(self, result: Body, box: OutputBox) -> None:
        """Keep the newest output of a request in its result, until its end."""
        try:
            async for outputs in box.outputs():
                completion = outputs[-1].outputs[0]
                result["text"], result["error"] = completion.text, completion.error
                result["reason"] = completion.finish_reason or "abort"
        except (ApiError, EngineDeadError) as error:
            result |= {"reason": "error", "error": api_error(error).message}

    async def _arrivals(self, rate: float, system: str, params: SamplingParams) -> None:
        """Start users at random times (a Poisson process)."""
        while True:
            await asyncio.sleep(random.expovariate(rate))
            user = asyncio.create_task(self._visit(random.choice(CHATS), system, params))
            self._users.add(user)
            user.add_done_callback(self._users.discard)
            self.crowd["users"] += 1

    async def _visit(self, question: str, system: str, params: SamplingParams) -> None:
        """Ask a question, and a second one about the answer."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        try:
            answer = await self._answer(messages, params)
            await asyncio.sleep(random.expovariate(1 / THINKING))
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": FOLLOW_UP},
            ]
            await self._answer(messages, params)
        except (ApiError, EngineDeadError, ValueError):
            self.crowd["refused"] += 1

    async def _answer(self, messages: list[Message], params: SamplingParams) -> str:
        request_id, task = await self._add("user", messages, params)
        try:
            await task
        finally:
            result = self._results.pop(request_id)
        return str(result["text"])
