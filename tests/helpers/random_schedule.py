"""Random schedules: requests arrive and are aborted at random, and each answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from milestones.lab.instruments.audit import assert_idle
from tests.helpers.fake_overlap import expected_output, text_of
from tests.helpers.oracle import MOST_STEPS, greedy

# Prompts may begin alike.
STEMS: tuple[list[int], ...] = ([], [1] * 12, [1] * 5 + [2] * 9, [3] * 24)


def random_sizes(
    chance: random.Random,
    page_sizes: Sequence[int] = (1, 2, 3, 4),
    lengths: Sequence[int] = (6, 20, 40),
) -> tuple[int, int, int]:
    """Return the size of a page, the longest prompt, and a number of pages that is just enough."""
    page_size, longest = chance.choice(page_sizes), chance.choice(lengths)
    return page_size, longest, -(-longest // page_size) + chance.choice([0, 1, 2, 10, 40])


def random_prompt(
    chance: random.Random, longest: int, stems: Sequence[list[int]] = STEMS
) -> list[int]:
    tail = [chance.randrange(50) for _ in range(longest)]
    return [*chance.choice(stems), *tail][: chance.randint(1, longest)]


def add_random(
    engine: Any,
    chance: random.Random,
    prompt: list[int],
    answer: Callable[..., list[int]] = expected_output,
    **more: Any,
) -> tuple[str, list[int]]:
    """Add a request with stops at random. Return its id and its expected answer.

    answer: called with the prompt, the number of tokens, the stop tokens and the stop string.
    more: arguments of `add_request`.
    """
    max_tokens = chance.choice([1, 2, 5, 12, 30])
    stops = chance.sample(range(50), chance.choice([0, 0, 3, 10]))
    stop = text_of([chance.randrange(50)]) if chance.random() < 0.25 else ""
    params = greedy(max_tokens, stop_token_ids=stops, stop=stop or (), ignore_eos=True)
    name = engine.add_request(prompt, params, **more)
    capacity = engine.core.scheduler.kv_cache.max_tokens + 1 - len(prompt)
    return name, answer(prompt, min(max_tokens, capacity), stops, stop)


def run_schedule(
    engine: Any,
    chance: random.Random,
    add: Callable[[], tuple[str, Any]],
    count: int,
    *,
    arrivals: float = 0.35,
    aborts: float = 0.08,
    before_step: Callable[[], None] = lambda: None,
    may_fail: bool = False,
) -> dict[str, Any]:
    """Run one random schedule, and require the right answers. Return what each request got.

    add: adds a random request, and returns its id and its answer: tokens, or a vector.
    count: the number of requests.
    arrivals, aborts: how likely a request arrives or is aborted before a step.
    may_fail: requests may end with an error. As after an abort, their tokens are a beginning.
    """
    expected: dict[str, Any] = {}
    finals: dict[str, Any] = {}
    aborted: set[str] = set()
    to_come, steps = count, 0
    while to_come or engine.has_unfinished_requests():
        steps += 1
        assert steps < MOST_STEPS, "I5: the schedule does not end"
        while to_come and chance.random() < arrivals:
            to_come -= 1
            name, answer = add()
            expected[name] = answer
        live = sorted(expected.keys() - finals.keys())
        if (
            live
            and chance.random() < aborts
            and engine.abort_request(victim := chance.choice(live))
        ):
            aborted.add(victim)
        before_step()
        for output in engine.step():
            assert output.request_id not in finals, "a request has an output after its final one"
            if output.finished:
                is_text = isinstance(output.outputs, list)
                finals[output.request_id] = output.outputs[0] if is_text else output.outputs
    assert finals.keys() == expected.keys(), "I5: a request has no final output"
    for name, found in finals.items():
        assert (found.finish_reason == "abort") == (name in aborted), f"I3: {name}: {found}"
        assert may_fail or found.finish_reason != "error", f"{name}: {found}"
        is_cut = found.finish_reason in ("abort", "error")
        assert is_answer(found, expected[name], is_cut), f"I1, I2: {name}: not {expected[name]}"
    assert_idle(engine)
    return finals


def is_answer(found: Any, expected: Any, is_cut: bool) -> bool:
    """Return whether a request got its answer: of tokens the beginning, if it was cut."""
    if isinstance(expected, torch.Tensor):
        return found.data is None if is_cut else torch.equal(found.data, expected)
    tokens: list[int] = found.token_ids
    return tokens == (expected[: len(tokens)] if is_cut else expected)
