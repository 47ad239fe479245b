"""The overlap protocol on hashes: random schedules on the latest and the earliest stream."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.forced_retractions import force_retractions
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import ModuleOf, schedules
from tests.helpers.fake_overlap import expected_output, hash_engine, text_of
from tests.helpers.oracle import greedy

pytestmark = [pytest.mark.since("m5_overlap"), pytest.mark.streams, pytest.mark.cpu]

SCHEDULES = schedules(1100)  # on each of the two streams
STEMS: tuple[list[int], ...] = ([], [], [1] * 12, [1] * 5 + [2] * 9)
STREAMS = (LateStream, EarlyStream)


def fuzz(module: ModuleType, seed: int, stream: type[LateStream], **config: Any) -> Any:
    """Run one random schedule: arrivals, stops, aborts, forced retractions, pools of few pages."""
    chance = random.Random(seed)
    page_size = chance.choice([1, 2, 3, 4, 16])
    longest = chance.choice([6, 20, 40])
    num_pages = -(-longest // page_size) + chance.choice([0, 1, 2, 10, 40])
    engine = hash_engine(
        module, stream(), num_pages, page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 3, 5, 16, 17, 64]), **config,
    )  # fmt: skip
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 1, 2, 7]))
    expected: dict[str, list[int]] = {}
    finals: dict[str, Any] = {}
    aborted: set[str] = set()
    to_come, steps = chance.randint(1, 10), 0
    while to_come or engine.has_unfinished_requests():
        steps += 1
        assert steps < 20_000, "I5: the schedule does not end"
        while to_come and chance.random() < 0.4:
            to_come -= 1
            tail = [chance.randrange(50) for _ in range(longest)]
            prompt = [*chance.choice(STEMS), *tail][: chance.randint(1, longest)]
            max_tokens = chance.choice([1, 2, 5, 12, 30])
            stops = chance.sample(range(50), chance.choice([0, 0, 3, 10]))
            stop = text_of([chance.randrange(50)]) if chance.random() < 0.3 else ""
            params = greedy(max_tokens, stop_token_ids=stops, stop=stop or (), ignore_eos=True)
            name = engine.add_request(prompt, params)
            capacity = min(max_tokens, num_pages * page_size + 1 - len(prompt))
            expected[name] = expected_output(prompt, capacity, stops, stop)
        live = sorted(expected.keys() - finals.keys())
        if live and chance.random() < 0.08:
            victim = chance.choice(live)
            if engine.abort_request(victim):
                aborted.add(victim)
        for output in engine.step():
            assert output.request_id not in finals, "a request has an output after its final one"
            if output.finished:
                finals[output.request_id] = output.outputs[0]
    for name, completion in finals.items():
        tokens = completion.token_ids
        if name in aborted:
            assert completion.finish_reason == "abort"
            assert tokens == expected[name][: len(tokens)], f"I1: schedule {seed}, {name}"
        else:
            assert tokens == expected[name], f"I1, I2: schedule {seed}, {name}"
    assert finals.keys() == expected.keys(), "I5: a request has no final output"
    assert_idle(engine)
    return engine


@pytest.mark.parametrize("stream", STREAMS)
def test_random_schedules(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """More than a thousand schedules are exact to the token. Each step and abort is audited."""
    engines = [fuzz(module_of("engine"), seed, stream) for seed in range(SCHEDULES)]
    stats = [engine.stats() for engine in engines]
    assert sum(s.num_retractions for s in stats) > SCHEDULES, "too few retractions"
    assert sum(s.padding_tokens for s in stats) > 0, "no token was computed for an ended request"
    assert sum(s.cached_prompt_tokens for s in stats) > SCHEDULES, "too few cached prefixes"


@pytest.mark.before("speculative")
def test_random_schedules_without_overlap(module_of: ModuleOf) -> None:
    for seed in range(schedules(150)):
        engine = fuzz(module_of("engine"), seed, LateStream, enable_overlap=False)
        assert engine.stats().padding_tokens == 0, "a serial loop computed a useless token"


def plant(
    name: str, module_of: ModuleOf, code_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant one of the mistakes that are easy to make with overlap."""
    scheduler = module_of("scheduler").Scheduler
    in_flight = module_of("in_flight").StepsInFlight

    def pages_are_freed_at_once(self: Any, request: Any) -> None:
        self.kv_cache.free(request)

    def no_request_is_known_to_end(running: list[Any]) -> list[Any]:
        return list(running)

    def lengths_stay_where_they_are(self: Any, batch: Any) -> None:
        advance(self, batch)
        for request in batch.requests:
            request.num_computed_tokens -= bool(request.num_computed_tokens > 3)

    def every_row_has_the_same_future(row: int) -> int:
        return -1

    def futures_are_tokens(row: int) -> int:
        return row + 1

    def the_dead_are_not_skipped(self: Any, batch: Any, sampled: Any) -> Any:
        reasons = {r: r.finish_reason for r in batch.requests}
        for request in batch.requests:
            request.finish_reason = None
        try:
            return update(self, batch, sampled)
        finally:
            for request, reason in reasons.items():
                request.finish_reason = request.finish_reason or reason

    def without_waiting(scheduler: Any, every: int | None) -> None:
        force(scheduler, every)
        scheduler.needs_result = lambda: False

    advance, force = in_flight.advance, force_retractions
    update = scheduler.update_from_output
    target, attribute, bug = {
        "freed at once": (in_flight, "free", pages_are_freed_at_once),
        "useless step": (code_of("scheduler"), "continuing", no_request_is_known_to_end),
        "stale lengths": (in_flight, "advance", lengths_stay_where_they_are),
        "one future": (code_of("in_flight"), "placeholder", every_row_has_the_same_future),
        "positive placeholder": (code_of("in_flight"), "placeholder", futures_are_tokens),
        "token after the end": (scheduler, "update_from_output", the_dead_are_not_skipped),
        "retracted in flight": (sys.modules[__name__], "force_retractions", without_waiting),
    }[name]
    monkeypatch.setattr(target, attribute, bug)
    if attribute == "continuing":  # an elective's own methods may call it, too
        monkeypatch.setattr(module_of("scheduler"), attribute, bug, raising=False)


@pytest.mark.parametrize(
    ("bug", "streams"),
    [
        ("freed at once", [LateStream]),  # the early stream writes before any page is freed
        ("useless step", STREAMS),
        ("stale lengths", STREAMS),
        ("one future", STREAMS),
        ("positive placeholder", STREAMS),
        ("token after the end", STREAMS),
        ("retracted in flight", STREAMS),
    ],
)
@pytest.mark.before("speculative")
def test_planted_bugs_are_caught(
    module_of: ModuleOf,
    code_of: ModuleOf,
    monkeypatch: pytest.MonkeyPatch,
    bug: str,
    streams: Sequence[type[LateStream]],
) -> None:
    """The fuzz can fail: it finds each of these bugs within 60 schedules."""
    plant(bug, module_of, code_of, monkeypatch)
    for stream in streams:
        with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
            for seed in range(60):
                fuzz(module_of("engine"), seed, stream)
