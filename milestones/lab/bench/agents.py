"""Agents that pause: their calls, their pauses, and what each policy of the cache gets to know.

Each agent calls, waits for its tool, and calls again with its whole conversation. The calls of all
agents are interleaved, and requests without a conversation come in between. Pauses are log-normal:
the slowest 5% of them have about half of the waiting time. A tool has a median of its own, so an
agent's past pauses tell something about its next one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from common import AgentHint
from common.displays.workload import Driver, Served, Workload, percentile

NUM_AGENTS, NUM_TURNS = 16, 6
FIRST_TOKENS, TOOL_TOKENS, OUTPUT_TOKENS = 128, 32, 8
NUM_OTHERS, OTHER_TOKENS = 60, 96  # requests of no conversation
EVERY = 0.02  # seconds from the first call of an agent to that of the next
SPAN = 4.0  # seconds in which the other requests arrive
MEDIAN_PAUSE = 0.1  # seconds
SIGMA = 1.645  # of the logarithm of a pause: then the longest 5% have half of the time
SIGMA_OF_TOOLS = 1.2  # the part of it between tools; the rest is between calls of one tool
TAIL = 0.05  # the share of the pauses that are called the tail
TTL = 1.0  # seconds, of the policy "TTL"
POLICIES = ("LRU", "TTL", "estimate", "hints", "oracle")


@dataclass(frozen=True)
class AgentLoad:
    """The requests, and the pauses of the agents, which are the first users of the workload."""

    workload: Workload
    tools: list[float]  # the median pause of each agent's tool, in seconds

    @property
    def pauses(self) -> list[list[float]]:
        return self.workload.pauses[: len(self.tools)]

    @property
    def num_tokens(self) -> int:
        """Return the working set: the tokens of all conversations at their ends."""
        users = range(len(self.tools))
        said = sum(len(tokens) for user in users for tokens in self.workload.follow_ups[user])
        firsts = sum(len(self.workload.prompts[user]) for user in users)
        return firsts + said + len(self.tools) * NUM_TURNS * OUTPUT_TOKENS

    @property
    def share_of_tail(self) -> float:
        """Return which share of all waiting the longest pauses have."""
        ranked = sorted((pause for user in self.pauses for pause in user), reverse=True)
        return sum(ranked[: tail_size(len(ranked))]) / sum(ranked)


def agent_load(seed: int = 1) -> AgentLoad:
    """Return the same load for the same seed."""
    drawn = random.Random(seed)
    of_calls = math.sqrt(SIGMA**2 - SIGMA_OF_TOOLS**2)
    tools = [MEDIAN_PAUSE * math.exp(drawn.gauss(0, SIGMA_OF_TOOLS)) for _ in range(NUM_AGENTS)]
    pauses = [
        [tool * math.exp(drawn.gauss(0, of_calls)) for _ in range(NUM_TURNS - 1)] for tool in tools
    ]

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(3, 250) for _ in range(count)]

    prompts = [tokens(FIRST_TOKENS) for _ in range(NUM_AGENTS)]
    prompts += [tokens(OTHER_TOKENS) for _ in range(NUM_OTHERS)]
    said = [[tokens(TOOL_TOKENS) for _ in range(NUM_TURNS - 1)] for _ in range(NUM_AGENTS)]
    arrivals = [EVERY * agent for agent in range(NUM_AGENTS)]
    arrivals += sorted(drawn.uniform(0, SPAN) for _ in range(NUM_OTHERS))
    nothing: list[list[Any]] = [[] for _ in range(NUM_OTHERS)]
    most = [OUTPUT_TOKENS] * len(prompts)
    workload = Workload(
        prompts, most, True, {}, arrivals, [*said, *nothing], [*pauses, *nothing]
    )  # fmt: skip
    return AgentLoad(workload, tools)


class AgentDriver(Driver):
    """Sends the calls of agents with the hints of a policy."""

    def __init__(self, load: AgentLoad, policy: str) -> None:
        super().__init__(load.workload)
        self.load, self.policy = load, policy

    def options(self, user: int) -> dict[str, Any]:
        if self.policy == "LRU" or user >= len(self.load.tools):
            return {}
        turn = len(self.turns[user]) - 1
        hint = hint_of(self.load, self.policy, user, turn)
        return {"agent_hint": hint}

    def resumed(self) -> list[tuple[Served, float]]:
        """Return the calls that came after a pause, each with the seconds of the pause."""
        calls = zip(self.turns, self.load.pauses, strict=False)
        return [pair for turns, pauses in calls for pair in zip(turns[1:], pauses, strict=True)]


def hint_of(load: AgentLoad, policy: str, agent: int, turn: int) -> AgentHint:
    """Return what a policy knows about an agent's conversation after one of its turns.

    TTL: a constant time to live. estimate: only the conversation, and its end. hints: the median
    pause of the agent's tool, too. oracle: the pause itself.
    """
    name, pauses = f"agent-{agent}", load.pauses[agent]
    if policy == "TTL":
        return AgentHint(name, ttl=TTL)
    if turn == len(pauses):
        return AgentHint(name, release=True)
    known = {"estimate": None, "hints": load.tools[agent], "oracle": pauses[turn]}
    return AgentHint(name, expected_pause=known[policy])


def tail_size(count: int) -> int:
    """Return how many of the longest pauses are the tail."""
    return max(1, round(TAIL * count))


def tail_of(resumed: list[tuple[Served, float]]) -> list[tuple[Served, float]]:
    """Return the calls after the longest pauses."""
    return sorted(resumed, key=lambda pair: -pair[1])[: tail_size(len(resumed))]


@dataclass(frozen=True)
class Resumed:
    """Figures of calls that came after a pause. Times to the first token are in seconds."""

    computed: float  # prompt tokens of a call that were computed before, and now again
    hit_rate: float  # share of the tokens before the pause that came from a cache
    points: tuple[float, float]  # p50 and p95 of the times to the first token
    mean: float  # of these times

    @staticmethod
    def of(calls: list[tuple[Served, float]]) -> Resumed:
        """Return the figures of calls. Only whole pages before the new tokens can be cached."""
        known = [len(call.prompt) - TOOL_TOKENS for call, _pause in calls]
        cached = [call.num_cached for call, _pause in calls]
        times = [call.token_seconds[0] - call.due for call, _pause in calls]
        again = sum(max(0, k - c) for k, c in zip(known, cached, strict=True))
        points = percentile(times, 50), percentile(times, 95)
        return Resumed(again / len(calls), sum(cached) / sum(known), points, fmean(times))
