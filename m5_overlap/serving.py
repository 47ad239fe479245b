"""Conversations that begin alike, served live: what the demo shows before it compares."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType

from common import SamplingParams
from common.dashboard import Dashboard
from common.demo import chats

from . import LLMEngine

RULES = (
    "You work for a help desk that people all over the world write to. Some are in a hurry, "
    "some are children, some read English as their third language. Be polite, be brief, and be "
    "right: if you do not know, say so and name who might. Never ask for a name, an address or a "
    "password. Never promise what others must keep. Use no lists and no headings, only sentences. "
    "What follows says what your own desk does. "
)
AGENTS = (
    "You are a patient physics teacher. Answer in two short sentences. Use plain words, give one "
    "example from daily life, never use a formula, and end with a question to the student.",
    "You are a travel guide for families with small children. Be friendly and practical. Name one "
    "place, say how long a visit takes, what it costs, and what to do when it rains.",
    "You are a careful code reviewer. Name the most serious problem first. Say why it is one, show "
    "how to mend it in a line, and say nothing about style unless you are asked.",
)
FOLLOW_UP = "Say that again in one sentence."
STEPS_BETWEEN_ARRIVALS = 2
TALK_TOKENS = 260  # for questions and answers, whatever the tokenizer


class Serving:
    """One run of the engine under the dashboard."""

    def __init__(self, engine: LLMEngine, console: Console, args: Namespace) -> None:
        self.engine = engine
        self.console = console
        self.args = args
        self.prompts: list[list[int]] = []

    def run(self, panels: Callable[[], Iterable[RenderableType]], panel_lines: int) -> None:
        """Conversations of two turns arrive one by one; the engine steps until all have ended."""
        talks = {}
        # A text has at least as many characters as tokens: cut so, it fits the smallest model.
        longest = (self.engine.config.max_model_len or 0) - TALK_TOKENS
        agents = [(RULES + agent)[:longest] for agent in AGENTS]
        arrivals = list(enumerate(chats(self.args.requests)))[::-1]
        steps = 0
        with Dashboard(
            self.engine, "requests", self.console, panels, panel_lines=panel_lines
        ) as dashboard:
            while arrivals or self.engine.has_unfinished_requests():
                if arrivals and steps % STEPS_BETWEEN_ARRIVALS == 0:
                    number, question = arrivals.pop()
                    system = {"role": "system", "content": agents[number % len(agents)]}
                    talk = [system, {"role": "user", "content": question}]
                    talks[self._say(dashboard, talk)] = talk
                for output in dashboard.step():
                    talk = talks.get(output.request_id, [])
                    if output.finished and len(talk) == 2:
                        talk.append({"role": "assistant", "content": output.outputs[0].text})
                        talk.append({"role": "user", "content": FOLLOW_UP})
                        talks[self._say(dashboard, talk)] = talk
                steps += 1
                if self.args.check:
                    self.engine.check_invariants()

    def _say(self, dashboard: Dashboard, talk: list[dict[str, str]]) -> str:
        """Send a conversation so far to the engine."""
        prompt = self.engine.input_processor.apply_chat_template(talk)
        name = f"r{len(self.prompts)}"
        self.prompts.append(list(prompt.prompt_token_ids))
        params = SamplingParams(max_tokens=self.args.max_tokens, temperature=0)
        dashboard.add(self.engine.add_request(prompt, params, name), talk[-1]["content"])
        return name
