"""The routes of the live page, and the page as one file."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.responses import HTMLResponse, Response

from common import SamplingParams
from common.tracing.player import filled, part, template
from common.validation import require_float

from ..errors import ApiError, Json
from ..generation import EventStream
from ..limits import OpenRequests
from ..prompts import PromptReader
from ..protocol import ChatCall
from .crowd import SYSTEM, Crowd
from .engines import ANSWER, Engines
from .page import Page, Shared

HERE = Path(__file__).parent
SCRIPTS = ("chats.js", "live.js")
MOST_USERS = 100.0  # per second


class PageCall(BaseModel):
    """A call of an open page."""

    model_config = ConfigDict(extra="forbid", strict=True)

    page: str


class SamplingCall(PageCall):
    """A call with the sampling parameters that the page has sliders for."""

    temperature: Any = 1.0
    top_p: Any = 1.0
    max_tokens: Any = ANSWER

    def params(self) -> SamplingParams:
        """Return the sampling parameters. Raises `ValueError` for a wrong one."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens
        )


class AskCall(SamplingCall):
    """Ask a question in a chat. messages: the whole conversation."""

    messages: list[dict[str, Any]]


class StopCall(PageCall):
    """Abort a request. id: as `/live/ask` returned it."""

    id: str


class CrowdCall(SamplingCall):
    """Set the arrival rate of simulated users.

    system: the system prompt of their conversations. beside: a page of another engine, where each
    user asks too.
    """

    rate: Any
    system: str
    beside: str | None = None


class MemoryCall(PageCall):
    """Choose the engine of a page. small: the one with few pages."""

    small: bool


class Live:
    """The open pages."""

    def __init__(self, engines: Engines, prompts: PromptReader, open: OpenRequests) -> None:
        self.engines = engines
        self.shared = Shared(prompts, open, itertools.count(1))
        self.pages: dict[str, Page] = {}

    def open_page(self, engine: str | None) -> Response:
        """Answer with the events of a new page. The page is closed when the stream ends."""
        page, resources = Page(self.shared, self.engines.named(engine)), ExitStack()
        self.pages[page.name] = page
        resources.callback(self._close, page)
        return EventStream(page.events(), resources)

    def page(self, name: str) -> Page:
        """Return an open page."""
        if name not in self.pages:
            raise ApiError(404, f"the page {name[:80]!r} is not open", param="page")
        return self.pages[name]

    def set_crowd(self, call: CrowdCall) -> None:
        """Let a crowd visit a page, or two of different engines, in place of their crowds."""
        require_float("rate", call.rate, low=0.0, high=MOST_USERS)
        pages = [self.page(call.page)]
        if call.beside is not None:
            pages.append(self.page(call.beside))
            if pages[0].watched is pages[1].watched:
                raise ApiError(400, "beside must be a page of another engine", param="beside")
        Crowd(pages, float(call.rate), call.system, call.params())

    async def choose(self, call: MemoryCall) -> None:
        """Let a page begin again, with the engine that it chooses."""
        page = self.page(call.page)
        chosen = await self.engines.small() if call.small else self.engines.first
        if not page.is_closed and page.watched is not chosen:
            page.watch(chosen)
        self._release()

    def close_pages(self) -> None:
        """Abort the requests of all pages."""
        for page in list(self.pages.values()):
            page.close()

    def _close(self, page: Page) -> None:
        del self.pages[page.name]
        page.close()
        self._release()

    def _release(self) -> None:
        self.engines.release([page.watched for page in self.pages.values()])


def add_routes(app: FastAPI, live: Live) -> None:
    """Add the page at `/`, and what it calls. With two engines, it has a frame for each."""
    one, names = live_html(), list(live.engines.by_name)
    both = one if len(names) == 1 else pair_html(names)

    @app.get("/")
    async def page(engine: str | None = None) -> Response:
        html = both if engine is None else one
        return HTMLResponse(html, headers={"Cache-Control": "no-cache"})

    @app.get("/live")
    async def events(engine: str | None = None) -> Response:
        return live.open_page(engine)

    @app.post("/live/ask")
    async def ask(call: AskCall) -> Response:
        messages = ChatCall(messages=call.messages).conversation(has_tools=False)
        return Json({"id": await live.page(call.page).ask(messages, call.params())})

    @app.post("/live/stop")
    async def stop(call: StopCall) -> Response:
        return Json({"stopped": live.page(call.page).stop(call.id)})

    @app.post("/live/crowd")
    async def crowd(call: CrowdCall) -> Response:
        live.set_crowd(call)
        return Json({"rate": call.rate})

    @app.post("/live/memory")
    async def memory(call: MemoryCall) -> Response:
        await live.choose(call)
        return Json({"small": call.small})

    @app.post("/live/again")
    async def again(call: PageCall) -> Response:
        live.page(call.page).begins_again = True
        return Json({"page": call.page})


def live_html() -> str:
    """Return the page. It loads nothing else, calls only its server, and draws as the player does.

    The page has the player's template in it, so that it can save a run without the server.
    """
    player = json.dumps(template(), ensure_ascii=True).replace("<", "\\u003c")
    return filled(
        (HERE / "live.html").read_text(encoding="utf-8"),
        STYLE=part("style.css") + (HERE / "live.css").read_text(encoding="utf-8"),
        SECTIONS=part("sections.html"),
        SCRIPT=part("script") + "".join((HERE / s).read_text("utf-8") for s in SCRIPTS),
        PLAYER=player,
        SYSTEM=SYSTEM,
    )


def pair_html(names: list[str]) -> str:
    """Return the page of two engines. Its frames have the page of each engine."""
    frames = "".join(f'<iframe title="{name}" src="/?engine={name}"></iframe>\n' for name in names)
    return filled(
        (HERE / "pair.html").read_text(encoding="utf-8"),
        STYLE=part("style.css"),
        TITLE=" beside ".join(names),
        FRAMES=frames,
    )
