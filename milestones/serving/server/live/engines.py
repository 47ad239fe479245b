"""`Engines`: those that pages watch. All compute with one loaded model, in turns (`turns.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import replace

from common import EngineConfig, LLMEngine, SamplingParams
from common.displays.demo import CHATS
from common.tracing.trace import describe

from ..engine_thread import EngineThread, Observer
from ..errors import ApiError
from ..limits import OpenRequests
from ..prompts import PromptReader
from ..turns import Turns
from .crowd import SYSTEM, User
from .recorder import Recorder, Watched

ANSWER = 64  # tokens of an answer, at most, if a page does not say otherwise
SMALL = 1.5  # conversations of the crowd that the small memory holds


class Engines:
    """The engine of the API, perhaps one beside it, and one with few pages while pages watch it.

    All methods are for the event loop's thread.
    """

    def __init__(
        self,
        engine: LLMEngine,
        thread: EngineThread,
        turns: Turns,
        prompts: PromptReader,
        open: OpenRequests,
        beside: LLMEngine | None = None,
    ) -> None:
        """thread: of the engine. turns: of all engines of its model."""
        self.first = Watched(thread, Recorder(thread))
        self.by_name = {describe(engine)["engine"]: self.first}
        if beside is not None:
            thread = EngineThread(beside, turns, Observer())
            self.by_name[describe(beside)["engine"]] = Watched(thread, Recorder(thread))
        self._engine, self._turns = engine, turns
        self._prompts, self._open = prompts, open
        self._small: asyncio.Task[Watched] | None = None
        self._waiting = 0  # calls that wait for the engine with few pages
        self._ends: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the engines that are there. The running event loop gets their outputs."""
        for watched in self.by_name.values():
            watched.engine.start()

    def named(self, name: str | None) -> Watched:
        """Return an engine by the name of its milestone; None: that of the API."""
        watched = self.first if name is None else self.by_name.get(name)
        if watched is None:
            raise ApiError(404, f"there is no engine {str(name)[:80]!r} here", param="engine")
        return watched

    async def small(self) -> Watched:
        """Return the engine with few pages, and build it if there is none.

        Raises `ApiError` if there can be none, or if the server is shutting down.
        """
        if "num_pages" not in describe(self._engine):
            raise ApiError(404, "this engine has no pages", param="small")
        if len(self.by_name) > 1:
            raise ApiError(404, "a server of two engines has no third one", param="small")
        with self._open.place_for(1):  # a server that drains waits until it is built
            if self._small is None or (self._small.done() and self._small.exception()):
                self._small = asyncio.create_task(self._build())
            self._waiting += 1
            try:
                return await asyncio.shield(self._small)
            finally:
                self._waiting -= 1

    def release(self, watched: Collection[Watched]) -> None:
        """Close the engine with few pages if it is none of those that pages watch."""
        small = self._small
        if small is None or self._waiting or not small.done() or small.exception():
            return
        if small.result() not in watched:
            self._small = None
            end = asyncio.create_task(small.result().close())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def stop(self) -> None:
        """Close all engines. That of the API is the last one, because it may own the model."""
        async with AsyncExitStack() as closing:  # each is closed, even if another one cannot be
            for watched in self.by_name.values():
                closing.push_async_callback(watched.close)
            if self._small is not None:
                await asyncio.wait([self._small])
                self.release(())
            await asyncio.gather(*self._ends)

    async def _build(self) -> Watched:
        config = replace(self._engine.config, num_pages=await self._few_pages())
        thread = EngineThread(await asyncio.to_thread(self._make, config), self._turns, Observer())
        thread.start()
        return Watched(thread, Recorder(thread), is_small=True)

    def _make(self, config: EngineConfig) -> LLMEngine:
        with self._turns.turn():
            return type(self._engine)(config, self._engine.loaded)

    async def _few_pages(self) -> int:
        """Return the number of pages for a conversation and a half."""
        user = User(SYSTEM, max(CHATS, key=len), 0.0, SamplingParams())
        prompt = await self._prompts.read_chat(user.conversation(answer=""))
        tokens = SMALL * (len(prompt.prompt_token_ids) + 2 * ANSWER)
        pages = -int(-tokens // self._engine.config.page_size)
        return min(pages, describe(self._engine)["num_pages"])
