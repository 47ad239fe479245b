"""Conversations for the simulator: random ones, and the workloads that real replicas serve too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .prefix_index import PageKey, page_keys


@dataclass(frozen=True)
class Session:
    """A conversation. Request i + 1 is sent `thinks[i]` seconds after the end of request i.

    keys: of all pages of the whole conversation. turns: for each request, the tokens of its prompt
    (all that came before is part of it) and of its output. reuses_outputs: whether the pages of an
    output are those of the next prompt.
    """

    start: float
    keys: list[PageKey]
    turns: Sequence[tuple[int, int]]
    thinks: Sequence[float]
    reuses_outputs: bool = True


@dataclass(frozen=True)
class Traffic:
    """Random conversations, which begin with one of many system prompts.

    skew: system prompt number i is chosen with a probability proportional to 1 / i ** skew. rate:
    conversations that begin per second. Lengths are in tokens.
    """

    rate: float
    num_systems: int = 1000
    skew: float = 1.0
    system_tokens: int = 512
    turns: int = 5
    user_tokens: int = 64
    output_tokens: int = 128
    think: float = 10.0
    page_size: int = 16

    def sessions(self, num_requests: int, seed: int = 0) -> Iterator[Session]:
        """Yield conversations with `num_requests` requests in total, in order of their starts."""
        source, time = random.Random(seed), 0.0
        weights = [1 / number**self.skew for number in range(1, self.num_systems + 1)]
        totals = list(itertools.accumulate(weights))
        shared, grown = self.system_tokens // self.page_size, self.user_tokens + self.output_tokens
        turns = [
            (self.system_tokens + turn * grown + self.user_tokens, self.output_tokens)
            for turn in range(self.turns)
        ]
        pages = sum(turns[-1]) // self.page_size
        for number in range(num_requests // self.turns):
            time += source.expovariate(self.rate)
            (system,) = source.choices(range(self.num_systems), cum_weights=totals)
            keys = [(system << 20) + page for page in range(shared)]
            own = (1 << 62) + (number << 20)
            keys += [own + page for page in range(shared, pages)]
            thinks = [source.expovariate(1 / self.think) for _ in turns[1:]]
            yield Session(time, keys, turns, thinks)


def conversation(
    start: float,
    prompts: Sequence[Sequence[int]],
    filler: Sequence[int],
    thinks: Sequence[float],
    page_size: int = 16,
) -> Session:
    """Return a conversation of given prompts, the first one and the follow-ups.

    filler: the tokens that stand for each output in the next prompt. They are not those of the
    output, so the pages of an output are of no use to the next prompt.
    """
    tokens: list[int] = []
    turns = []
    for prompt in prompts:
        tokens += prompt
        turns.append((len(tokens), len(filler)))
        tokens += filler
    return Session(start, page_keys(tokens, page_size), turns, thinks, reuses_outputs=False)
