"""Measure real replicas: hit rate and time to the first token, of each policy in one run.

The two workloads have the lengths of `shared` and `turns` of `bench`, in a random order. In the
order of `bench`, prompt i has system prompt i % 8, and round robin over 2, 4 or 8 replicas would
send each system prompt to one replica by chance. The policies take turns on the same replicas, and
all caches are emptied between two of them.

A tiny model computes a whole prompt in no time, so each replica has an emulated device: a step
takes at least `STEP_MS`, and computes at most `STEP_TOKENS`. A prompt of 300 tokens then takes five
steps, and a prompt that is cached one. A device that sleeps needs no core of a small machine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ..load.arrivals import Arrival
from ..load.client import Answer, Target
from .policy import make_policy
from .simulation import Fleet, simulate
from .steps import StepModel
from .traffic import conversation

STEP_MS, STEP_TOKENS = 50.0, 64
MAX_NUM_SEQS = 16
GAP = 0.1  # seconds from one arrival to the next
OUTPUT_TOKENS = 32
FILLER = [20 + i for i in range(OUTPUT_TOKENS)]  # in a prompt, in the place of an output
JITTER = 0.2
SEEDS = 20  # of the simulations that are compared with a real run


@dataclass(frozen=True)
class Conversation:
    """Prompts of one client. start: seconds. thinks: seconds before each follow-up."""

    start: float
    prompts: list[list[int]]
    thinks: list[float] = field(default_factory=list)


@dataclass
class Counted:
    """What clients have counted in one run. Token counts; seconds to the first token."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Return the part of the prompt tokens that a cache had."""
        return self.cached_tokens / self.prompt_tokens

    def add(self, answer: Answer) -> None:
        """Count one answer. Raises `RuntimeError` if the server did not give it."""
        if answer.first is None or answer.error is not None:
            raise RuntimeError(answer.error)
        self.first.append(answer.first)
        self.prompt_tokens += answer.usage["prompt_tokens"]
        self.cached_tokens += answer.usage["prompt_tokens_details"]["cached_tokens"]


def shared(vocab_size: int, seed: int) -> list[Conversation]:
    """Return 96 questions about eight system prompts of 300 tokens, in a random order."""
    source = random.Random(seed)
    systems = [_tokens(source, vocab_size, 300) for _ in range(8)]
    order = [system for system in systems for _ in range(12)]
    source.shuffle(order)
    return [
        Conversation(i * GAP, [system + _tokens(source, vocab_size, source.randint(8, 24))])
        for i, system in enumerate(order)
    ]


def turns(vocab_size: int, seed: int) -> list[Conversation]:
    """Return 24 conversations of five turns: 100 prompt tokens, then 30 per turn."""
    source = random.Random(seed)
    return [
        Conversation(
            i * GAP,
            [_tokens(source, vocab_size, n) for n in (100, 30, 30, 30, 30)],
            [source.expovariate(1 / (5 * GAP)) for _ in range(4)],
        )
        for i in range(24)
    ]


WORKLOADS = {"shared": shared, "turns": turns}


def _tokens(source: random.Random, vocab_size: int, size: int) -> list[int]:
    return [source.randint(10, min(250, vocab_size - 1)) for _ in range(size)]


async def run_real(url: str, model: str, work: Sequence[Conversation]) -> Counted:
    """Send all conversations to a server, and return what their clients have counted.

    In the next prompt, `FILLER` stands for an output. The server streams text, and the text of
    random tokens does not always have the same tokens. So the next prompt has the cached prefix up
    to this output, and not beyond it.
    """
    counted, started, target = Counted(), time.perf_counter(), Target(url, None)
    async with target.client:

        async def converse(one: Conversation) -> None:
            await asyncio.sleep(max(0.0, started + one.start - time.perf_counter()))
            prompt: list[int] = []
            for turn, own in enumerate(one.prompts):
                if turn:
                    await asyncio.sleep(one.thinks[turn - 1])
                prompt = prompt + own
                counted.add(await target.send(model, Answer(Arrival(0.0, prompt, OUTPUT_TOKENS))))
                prompt += FILLER

        await asyncio.gather(*map(converse, work))
    return counted


def emulated_steps() -> StepModel:
    """Return the step model of the emulated device."""
    step = STEP_MS / 1000
    prefill = [(1, step), (STEP_TOKENS, step), (10 * STEP_TOKENS, 10 * step)]
    return StepModel("an emulated device", [(1, step)], prefill)


def run_simulated(
    work: Sequence[Conversation], policy: str, num_replicas: int, num_pages: int, steps: StepModel
) -> float:
    """Return the median hit rate of simulations of the same conversations.

    The order of requests decides what round robin hits, and a real machine does not keep times
    exactly. So each simulation has its own start times and pauses, up to `JITTER` longer.
    """
    rates = []
    for seed in range(SEEDS):
        source = random.Random(seed)
        sessions = [
            conversation(
                one.start + GAP * source.random(),
                one.prompts,
                FILLER,
                [think * (1 + JITTER * source.random()) for think in one.thinks],
            )
            for one in work
        ]
        sessions.sort(key=lambda session: session.start)
        fleet = Fleet(num_replicas, steps, num_pages, max_num_seqs=MAX_NUM_SEQS)
        rates.append(simulate(fleet, make_policy(policy, seed), sessions).hit_rate)
    return median(rates)
