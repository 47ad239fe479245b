"""`Crowd`: simulated users. They arrive at random on one page, or on two pages side by side."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common import SamplingParams
from common.displays.demo import CHATS

SYSTEM = (
    "You are a patient teacher in a course about computers and nature. Answer in at most three "
    "short sentences. Use plain words, give one example, and do not repeat the question."
)
THINKING = 1.0  # seconds on average until a user of the crowd asks again
FOLLOW_UP = "Say the same in one short sentence."


@dataclass(frozen=True)
class User:
    """A simulated user. thinking: seconds between an answer and the follow-up question."""

    system: str
    question: str
    thinking: float
    params: SamplingParams

    def conversation(self, answer: str | None = None) -> list[dict[str, str]]:
        """Return the messages of the question, or with its answer, those of the follow-up."""
        asked = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.question},
        ]
        if answer is None:
            return asked
        answered = {"role": "assistant", "content": answer}
        return [*asked, answered, {"role": "user", "content": FOLLOW_UP}]


class Visited(Protocol):
    """A page, as the crowd sees it."""

    crowd: Crowd | None

    def visit(self, user: User) -> None: ...


class Crowd:
    """Lets users arrive on all of its pages: each asks the same in all of them, at one moment.

    A page has at most one crowd. All methods are for the event loop's thread.
    """

    def __init__(
        self, pages: Sequence[Visited], rate: float, system: str, params: SamplingParams
    ) -> None:
        """rate: users per second. With 0, none arrive."""
        self._pages = list(pages)
        self._task = asyncio.create_task(self._arrivals(rate, system, params))
        for page in pages:
            if page.crowd is not None:
                page.crowd.leave(page)
            page.crowd = self

    def leave(self, page: Visited) -> None:
        """Send no more users to a page. Those that are there go on."""
        page.crowd = None
        self._pages.remove(page)
        if not self._pages:
            self._task.cancel()

    async def _arrivals(self, rate: float, system: str, params: SamplingParams) -> None:
        """Start users at random times (a Poisson process)."""
        while rate:
            await asyncio.sleep(random.expovariate(rate))
            thinking = random.expovariate(1 / THINKING)
            user = User(system, random.choice(CHATS), thinking, params)
            for page in self._pages:
                page.visit(user)
