"""Agents that pause, and the same calls on priority: `python -m milestones demo agents`."""

from __future__ import annotations

from ... import paths_below

__path__ += paths_below(__name__)

import random  # noqa: E402
from argparse import Namespace  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from typing import Any  # noqa: E402

from rich.console import Console  # noqa: E402

from common import AgentHint, EngineConfig, RequestOutput  # noqa: E402
from common.displays.comparison import Figure, counter, seconds, workload_of  # noqa: E402
from common.displays.dashboard import Dashboard  # noqa: E402
from common.displays.demo import (  # noqa: E402
    engine_options,
    in_virtual_time,
    look,
    make_console,
    open_engine,
    parser,
    recorded,
    say,
)
from common.displays.serving import Talk, Users  # noqa: E402
from common.displays.workload import percentile  # noqa: E402

from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
TOOLS = (0.02, 2.0)  # seconds: the median pauses of the two tools
SIGMA = 0.5  # of the logarithm of a pause
FIGURES: dict[str, Figure] = {
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "steps": counter("num_steps"),
    "TTFT p95": lambda r: seconds(percentile(r.first_token_seconds, 95)),
}
LOOK = "Look at the second call of each agent: it begins with its first one, which may be cached."
SEEN = (
    "A paused conversation keeps its pages until others need them, and those that return latest "
    "go first. Their copies stay at the host. Hints change which pages go, and no answer."
)


@dataclass
class Agents(Users):
    """Users that run a tool before they call a second time, for a fast or for a slow tool."""

    engine: Any
    arrivals: Any
    dashboard: Any
    max_tokens: int
    drawn: random.Random = field(default_factory=lambda: random.Random(0))
    resting: list[tuple[float, int, Talk]] = field(default_factory=list)  # due, number, talk
    caching: list[int] = field(default_factory=list)  # cached tokens of each second call

    def __post_init__(self) -> None:
        super().__init__(self.engine, self.arrivals, self.dashboard, self.max_tokens)
        self.numbers: dict[str, int] = {}  # of the agents, by the id of a call
        self.number, self.is_last = 0, False

    def send_burst(self) -> None:
        """Send the first calls of agents that begin now."""
        before = set(self.first_turns)
        self.number = len(self.numbers)
        super().send_burst()
        for request_id in self.first_turns.keys() - before:
            self.numbers[request_id] = self.number

    def answer(self, output: RequestOutput) -> None:
        """After a first call, the agent runs its tool."""
        if not output.finished:
            return
        if (talk := self.first_turns.pop(output.request_id, None)) is None:
            self.caching.append(output.metrics.num_cached_tokens)
            return
        number = self.numbers[output.request_id]
        pause = TOOLS[number % 2] * self.drawn.lognormvariate(0, SIGMA)
        said = {"role": "assistant", "content": output.outputs[0].text}
        result = {"role": "user", "content": self.arrivals.follow_up}
        self.resting.append((self.engine.now() + pause, number, [*talk, said, result]))

    def send_due(self) -> None:
        """Send the second calls that are due. If nothing else is to do, wait for one."""
        self.resting.sort(key=lambda call: call[0])
        if self.resting and not self.waiting and not self.engine.has_unfinished_requests():
            self.engine.clock.sleep(self.resting[0][0] - self.engine.now())
        while self.resting and self.resting[0][0] <= self.engine.now():
            _due, self.number, talk = self.resting.pop(0)
            self.is_last = True
            self.send(talk)
            self.is_last = False

    def hint(self) -> AgentHint:
        """Return the hint of the call that is sent now."""
        pause = TOOLS[self.number % 2]
        return AgentHint(f"agent {self.number}", expected_pause=pause, release=self.is_last)


class DemoEngine(LLMEngine):
    """An engine that asks the agents of the demo for their hints."""

    agents: Agents | None = None

    def add_request(self, *args: Any, **more: Any) -> str:
        if self.agents is not None:
            more["agent_hint"] = self.agents.hint()
        return super().add_request(*args, **more)


def serve(engine: Any, panels: LivePanels, args: Namespace, console: Console) -> Agents:
    """Let all agents make their calls, live."""
    arrivals = conversations(args.requests, engine.config)
    with Dashboard(engine, "calls", console, panels) as dashboard:
        agents = engine.agents = Agents(engine, arrivals, dashboard, args.max_tokens)
        steps = 0
        while agents.waiting or agents.resting or engine.has_unfinished_requests():
            if steps % arrivals.every == 0:
                agents.send_burst()
            agents.send_due()
            for output in dashboard.step():
                agents.answer(output)
            steps += 1
            if args.check:
                engine.check_invariants()
    return agents


def main() -> None:
    """Serve agents live, with hints; then the same calls on the elective below."""
    args = parser("Conversations that pause.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=3, page_size=8, num_pages=72)
    with open_engine(DemoEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        with recorded(engine, args, console) as trace:
            agents = serve(engine, LivePanels(engine, trace.data, console), args, console)
        cache = engine.core.scheduler.kv_cache.radix_cache
        say(
            console,
            f"{cache.num_demoted} conversations were demoted, {cache.num_written} pages were copied"
            f" to the host, and {cache.num_loaded} back. {sum(agents.caching)} prompt tokens of "
            f"{len(agents.caching)} second calls came from the pool or from the host.",
        )
        engine.agents = None
        title = "without pauses, all at once"
        compare(NAME, workload_of(engine, agents.prompts, args, costs), FIGURES, console, title)
    say(console, f"\n{SEEN}")
