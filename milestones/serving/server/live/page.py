"""`Page`: one open page, with its chats and its crowd of canned users."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common import EngineDeadError, SamplingParams
from common.displays.demo import CHATS

from ..engine_thread import EngineRequest, EngineThread
from ..errors import ApiError, api_error
from ..generation import event, now
from ..limits import OpenRequests
from ..output_box import OutputBox
from ..prompts import PromptReader
from .recorder import Recorder

INTERVAL = 0.05  # seconds between two events, at least
THINKING = 1.0  # seconds on average until a user of the crowd asks again
FOLLOW_UP = "Say the same in one short sentence."
Body = dict[str, Any]
Message = dict[str, str]


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
        """Let `rate` canned users per second arrive from now on. Earlier users go on."""
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

        def ended(task: asyncio.Task[None]) -> None:  # also if it was cancelled before its start
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
