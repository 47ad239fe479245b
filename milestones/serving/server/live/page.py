"""`Page`: one open page, with its chats, the users of its crowd, and the events that it gets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from common import EngineDeadError, SamplingParams

from ..engine_thread import EngineRequest, OutputBox
from ..errors import ApiError, api_error
from ..generation import event, now
from ..limits import OpenRequests
from ..prompts import PromptReader
from .crowd import Crowd, User
from .recorder import Watched

INTERVAL = 0.05  # seconds between two events, at least
Body = dict[str, Any]
Message = dict[str, str]


@dataclass(frozen=True)
class Shared:
    """What the pages use of the server. ids: the numbers of pages, chats and users."""

    prompts: PromptReader
    open: OpenRequests
    ids: itertools.count[int]


class Page:
    """The requests of one open page. They are aborted when the page is closed.

    All methods are for the event loop's thread.
    """

    def __init__(self, shared: Shared, watched: Watched) -> None:
        self.shared = shared
        self.watched = watched
        self.name = f"page-{next(shared.ids)}"
        self.begins_again = False  # the page wants a new snapshot
        self.is_closed = False
        self.crowd: Crowd | None = None
        self.came = {"users": 0, "refused": 0}
        self._sent = dict(self.came)
        self._answers: list[Body] = []  # of chats; not sent yet
        self._results: dict[str, Body] = {}  # of requests that are open
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request
        self._users: set[asyncio.Task[None]] = set()

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

    def visit(self, user: User) -> None:
        """Start a simulated user."""
        task = asyncio.create_task(self._visit(user))
        self._users.add(task)
        task.add_done_callback(self._users.discard)
        self.came["users"] += 1

    def watch(self, watched: Watched) -> None:
        """Begin again with another engine. The requests on the engine so far are aborted."""
        self._leave()
        self.watched, self.begins_again = watched, True

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
        self._leave()

    def _leave(self) -> None:
        if self.crowd is not None:
            self.crowd.leave(self)
        for task in [*self._users, *self._tasks.values()]:
            task.cancel()
        self.watched.recorder.leave(self.name)

    async def _begin(self) -> Body:
        self.begins_again, watched = False, self.watched
        snapshot = await watched.recorder.join(self.name)
        if watched is not self.watched:  # the page has another engine since then
            return {}
        self._step = snapshot.frames[0].step
        begin = {"page": self.name, "begin": snapshot.as_json(), "small": watched.is_small}
        return {**begin, **self._ends()}

    async def _news(self) -> Body:
        """Return what the page does not have yet; nothing if there is nothing new."""
        if not self.watched.engine.is_alive:
            raise self.watched.engine.dead()
        trace = self.watched.recorder.since(self._step)
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
        if self.came != self._sent:
            body["crowd"] = self._sent = dict(self.came)
        return body

    async def _add(
        self, kind: str, messages: list[Message], params: SamplingParams
    ) -> tuple[str, asyncio.Task[None]]:
        """Add a request. Return its id, and the task that waits for its end."""
        arrival_time, watched = now(), self.watched
        with ExitStack() as resources:
            resources.enter_context(self.shared.open.place_for(1))
            prompt = await self.shared.prompts.read_chat(messages)
            self._require_at(watched)  # an engine that was left may have been closed
            request_id = f"{kind}-{next(self.shared.ids)}"
            request = EngineRequest(request_id, prompt, params, arrival_time)
            box = await watched.engine.open([request])
            resources.callback(watched.engine.close, box)
            self._require_at(watched)
            result = {"id": request_id, "text": "", "reason": "abort", "error": None}
            task = asyncio.create_task(self._follow(result, box))
            held = resources.pop_all()
        self._results[request_id], self._tasks[request_id] = result, task

        def ended(task: asyncio.Task[None]) -> None:  # even if it was cancelled before its start
            held.close()
            del self._tasks[request_id]

        task.add_done_callback(ended)
        return request_id, task

    def _require_at(self, watched: Watched) -> None:
        """Raise `ApiError` if the page was closed, or if it has another engine since then."""
        if self.is_closed or watched is not self.watched:
            raise ApiError(404, f"the page {self.name!r} has left this engine", param="page")

    async def _follow(self, result: Body, box: OutputBox) -> None:
        """Keep the newest output of a request in its result, until its end."""
        try:
            async for outputs in box.outputs():
                completion = outputs[-1].outputs[0]
                result["text"], result["error"] = completion.text, completion.error
                result["reason"] = completion.finish_reason or "abort"
        except (ApiError, EngineDeadError) as error:
            result |= {"reason": "error", "error": api_error(error).message}

    async def _visit(self, user: User) -> None:
        """Ask a question, and a second one about the answer."""
        try:
            answer = await self._answer(user.conversation(), user.params)
            await asyncio.sleep(user.thinking)
            await self._answer(user.conversation(answer), user.params)
        except (ApiError, EngineDeadError, ValueError):
            self.came["refused"] += 1

    async def _answer(self, messages: list[Message], params: SamplingParams) -> str:
        request_id, task = await self._add("user", messages, params)
        try:
            await task
        finally:
            result = self._results.pop(request_id)
        return str(result["text"])
