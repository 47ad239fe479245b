"""Conversations that arrive over time, served live under the dashboard of a demo."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, RenderableType

from ..inputs import Message
from ..llm_engine import LLMEngine
from ..outputs import RequestOutput
from ..sampling.params import SamplingParams
from .dashboard import Dashboard
from .demo import chats

Talk = list[Message]


# What a demo shows below the requests, the most important first. It is called for each refresh.
Panels = Callable[[], Iterable[RenderableType]]


@dataclass
class Arrivals:
    """Conversations, and when they arrive.

    talks: the messages of each conversation; the last one is the user's.
    burst: the number of conversations that arrive together.
    every: the number of steps from one burst to the next.
    follow_up: the second message of each user. None: each conversation has one turn.
    """

    talks: list[Talk]
    burst: int
    every: int
    follow_up: str | None = None


def questions(count: int) -> list[Talk]:
    """Return `count` conversations that consist of one question."""
    return [[{"role": "user", "content": question}] for question in chats(count)]


def serve(
    engine: LLMEngine,
    arrivals: Arrivals,
    panels: Panels,
    args: Namespace,
    console: Console,
) -> list[list[int]]:
    """Serve conversations live until all have ended.

    Returns the prompts as token ids, in order of arrival. A second turn is a prompt of its own.
    """
    with Dashboard(engine, "requests", console, panels) as dashboard:
        users = Users(engine, arrivals, dashboard, args.max_tokens)
        steps = 0
        while users.waiting or engine.has_unfinished_requests():
            if steps % arrivals.every == 0:
                users.send_burst()
            for output in dashboard.step():
                users.answer(output)
            steps += 1
            if args.check:
                engine.check_invariants()
    return users.prompts


class Users:
    """The users of a demo. They send questions, and follow-ups when an answer is complete."""

    def __init__(
        self, engine: LLMEngine, arrivals: Arrivals, dashboard: Dashboard, max_tokens: int
    ) -> None:
        self.engine = engine
        self.arrivals = arrivals
        self.dashboard = dashboard
        self.params = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.waiting = list(arrivals.talks)  # conversations that have not begun
        self.first_turns: dict[str, Talk] = {}  # by request id
        self.prompts: list[list[int]] = []

    def send_burst(self) -> None:
        """Send the first questions of the conversations that arrive now."""
        for talk in self.waiting[: self.arrivals.burst]:
            self.first_turns[self.send(talk)] = talk
        del self.waiting[: self.arrivals.burst]

    def answer(self, output: RequestOutput) -> None:
        """If `output` completes a first turn, send the follow-up."""
        if not output.finished or self.arrivals.follow_up is None:
            return
        if (talk := self.first_turns.pop(output.request_id, None)) is not None:
            answer = {"role": "assistant", "content": output.outputs[0].text}
            self.send([*talk, answer, {"role": "user", "content": self.arrivals.follow_up}])

    def send(self, talk: Talk) -> str:
        """Send a conversation to the engine. Return the id of the request."""
        prompt = self.engine.input_processor.apply_chat_template(talk)
        name = f"r{len(self.prompts)}"
        self.prompts.append(list(prompt.prompt_token_ids))
        self.engine.add_request(prompt, self.params, name)
        self.dashboard.add(name, talk[-1]["content"])
        return name
