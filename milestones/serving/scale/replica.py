"""`Replica`: an engine and its server, called without a socket.

The application is the one that `python -m milestones serve` runs, so a replica answers as a server
of its own would. The front has the socket.
"""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from starlette.types import Message, Scope

from common import EngineConfig, LLMEngine

from ...chain import load
from ..server.app import Api, create_app
from ..server.settings import ServerSettings
from .prefix_index import CacheLog, CacheReport, PageKey, page_keys
from .settings import ScaleSettings
from .wire import Description, ForwardedCall, Head, Item, Tail


class Replica:
    """Answers the calls that a front forwards. The first one starts the engine's thread."""

    def __init__(
        self,
        name: str,
        milestone: str,
        config: EngineConfig,
        settings: ServerSettings,
        scale: ScaleSettings,
    ) -> None:
        self.name = name
        engine = open_engine(milestone, config, scale)
        self._app = create_app(engine, replace(settings, live_page=False))
        self._api: Api = self._app.state.api
        self._describe = description(name, engine, self._api.prompts.chat_template)
        self._log = CacheLog()
        self._keys = TreeKeys(engine)
        self._stack = AsyncExitStack()
        self._starting: asyncio.Lock = asyncio.Lock()
        self._is_started = False
        self._has_sides = scale.decode > 0

    async def stop(self) -> None:
        """Close the engine."""
        await self._stack.aclose()

    @property
    def is_alive(self) -> bool:
        """Return whether the engine can still answer."""
        return not self._is_started or self._api.engine.is_alive

    def poll(self) -> None:
        """Let an engine with prefill processes notice which have ended, also if it is idle."""
        if self._has_sides and self._is_started:
            self._api.engine.post(poll_prefill_processes)

    def description(self) -> Description:
        """Return what a front must know."""
        return self._describe

    async def metrics(self) -> tuple[str, str]:
        """Return the name of the replica and its page for Prometheus."""
        await self._start()
        page = await self._api.scrape()
        return self.name, bytes(page.body).decode()

    async def reset(self) -> int:
        """Empty the prefix cache. Return the pages that became free."""
        await self._start()
        return await self._api.engine.call(lambda engine: engine.reset_prefix_cache())

    async def answer(self, call: ForwardedCall) -> AsyncIterator[Item]:
        """Yield the answer to a call: the head, the body in pieces, the tail.

        If the front stops reading, the call ends as if its client had closed the connection.
        """
        await self._start()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        work = asyncio.create_task(self._run(call, messages))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield Head(self.name, message["status"], tuple(message["headers"]))
                elif body := message.get("body", b""):
                    yield bytes(body)
            await work  # raises what the application raised
            yield Tail(self.name, await self._report((call.seen or {}).get(self.name, 0)))
        finally:
            work.cancel()

    async def _start(self) -> None:
        """Start the engine's thread, once. The running event loop is the one that gets outputs."""
        async with self._starting:
            if not self._is_started:
                await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
                self._is_started = True

    async def _run(self, call: ForwardedCall, messages: asyncio.Queue[Message | None]) -> None:
        """Run the application on a call. None is the last message."""
        body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # the front cancels this task if its client goes away
            raise AssertionError

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        try:
            await self._app(scope_of(call), receive, send)
        finally:
            messages.put_nowait(None)

    async def _report(self, seen: int) -> CacheReport | None:
        if self._keys.cache is None or not self._api.engine.is_alive:
            return None

        def read(engine: LLMEngine) -> CacheReport:
            self._log.update(self._keys.read())
            return self._log.since(seen)

        return await self._api.engine.call(read)


class TreeKeys:
    """The keys of all pages of an engine's prefix tree. The engine's thread reads them.

    The keys of a node are computed once. A node only ever gets shorter, by a split or an eviction,
    so a node of the same length has the same keys.
    """

    def __init__(self, engine: LLMEngine) -> None:
        kv_cache = getattr(engine.core.scheduler, "kv_cache", None)
        self.cache: Any = getattr(kv_cache, "radix_cache", None)
        self._known: WeakKeyDictionary[Any, list[PageKey]] = WeakKeyDictionary()

    def read(self) -> list[PageKey]:
        """Return the keys of all cached pages, each after the pages before it."""
        found: list[PageKey] = []
        for node in self.cache.nodes():
            keys = self._known.get(node)
            if keys is None or len(keys) != len(node.pages):
                above = self._known.get(node.parent)
                parent = above[-1] if above else 0
                keys = self._known[node] = page_keys(node.tokens, self.cache.page_size, parent)
            found += keys
        return found


def open_engine(milestone: str, config: EngineConfig, scale: ScaleSettings) -> LLMEngine:
    """Return the engine of a replica. That of two sides starts its prefill processes."""
    if not scale.decode:
        engine: LLMEngine = load(milestone).LLMEngine(config)
        return engine
    from ..sides.engine import LLMEngine as DecodeSide

    num_prefill = scale.prefill // scale.decode
    return DecodeSide(config, num_prefill=num_prefill, kv_transfer=scale.kv_transfer)


def poll_prefill_processes(engine: Any) -> None:
    """Notice which prefill processes have ended. The engine is a decode side."""
    engine.core.poll()


def description(name: str, engine: LLMEngine, chat_template: str | None) -> Description:
    """Return what a front must know about an engine.

    chat_template: of the settings; None for that of the model.
    """
    cache, tokenizer = TreeKeys(engine).cache, copy.copy(engine.loaded.tokenizer)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    assert engine.config.max_model_len is not None
    return Description(
        name,
        os.getpid(),
        engine.loaded.name,
        engine.config.max_model_len,
        cache.page_size if cache is not None else None,
        engine.stats().kv_pages_total,
        pickle.dumps(tokenizer),
    )


def scope_of(call: ForwardedCall) -> Scope:
    """Return a call as ASGI describes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": unquote(call.path),
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
    }
