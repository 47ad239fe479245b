"""When requests arrive (a Poisson process), and what they ask for."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# The server tokenizes this text, and each prompt is a random order of its tokens. So no prompt has
# a special token, and no two prompts begin alike, except for shared prefixes.
TEXT = (
    "the sea is calm today and a ship waits near the old harbor while two birds look for fish "
    "some people walk along the beach others read a book or cook food under the tall trees "
)


@dataclass(frozen=True)
class Arrival:
    """A request: when it is sent, in seconds from the start, and what it asks for."""

    time: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """What the requests of a run have in common.

    prompt_tokens, output_tokens: the ranges that lengths are drawn from.
    token_ids: the tokens that prompts are made of.
    num_prefixes, prefix_tokens: each prompt begins with one of that many prefixes, of this length.
    """

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    token_ids: Sequence[int]
    num_prefixes: int = 0
    prefix_tokens: int = 0

    def arrivals(self, rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
        """Yield the requests that arrive within so many seconds, at `rate` per second on average.

        The time from one arrival to the next is drawn from an exponential distribution. With the
        same seed, the requests are the same.
        """
        source = random.Random(seed)
        prefixes = [
            source.choices(self.token_ids, k=self.prefix_tokens) for _ in range(self.num_prefixes)
        ]
        time = source.expovariate(rate)
        while time < seconds:
            size, most = source.randint(*self.prompt_tokens), source.randint(*self.output_tokens)
            own = source.choices(self.token_ids, k=size)
            prefix = source.choice(prefixes) if prefixes else []
            yield Arrival(time, [*prefix, *own], most)
            time += source.expovariate(rate)


def length_range(text: str) -> tuple[int, int]:
    """Read `100` or `100-1024` as a range of lengths."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise argparse.ArgumentTypeError(f"a length is 100 or 100-1024, got {text!r}")
    return int(found[1]), int(found[2] or found[1])
