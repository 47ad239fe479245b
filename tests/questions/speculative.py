"""The questions of speculative: drafts from the text, and runs with right and wrong drafts."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.exercises.test_speculative_1 import propose
from tests.exercises.test_speculative_2 import OUTPUT, lengths, made

Asked = Iterator[tuple[str, str, Any]]


def lookups(chance: Random) -> Asked:
    for _ in range(30):
        tokens = [chance.randrange(3) for _ in range(chance.randint(1, 24))]
        count = chance.randint(1, 5)
        sizes = chance.choice([(3, 2), (2,), (4, 3, 2), (1,)])
        kind = "matches of one length" if len(sizes) == 1 else "matches of several lengths"
        yield kind, f"propose({tokens}, {count}), sizes {sizes}", propose(tokens, count, sizes)


def runs(chance: Random) -> Asked:
    for _ in range(6):
        wrong = {place for place in range(30) if chance.random() < 0.3}
        max_tokens = chance.randint(2, 28)
        stops = chance.sample(OUTPUT, chance.choice([0, 1]))
        engine = made(wrong, max_tokens, stop_token_ids=stops)
        found = lengths(engine)
        stats = engine.stats()
        counted = [stats.num_draft_tokens, stats.num_accepted_tokens, stats.decode_tokens]
        about = f"wrong at {sorted(wrong)}, {max_tokens} tokens, stops {stops}"
        yield "the output of each step", about, found
        yield "counters", about, [*counted, stats.padding_tokens]
        yield "cached pages", about, stats.kv_pages_cached


QUESTIONS = {"speculative.1": (lookups, 30), "speculative.2": (runs, 24)}
