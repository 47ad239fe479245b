"""The overlap protocol on hashes: random schedules on the latest and the earliest stream."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from common.tracing.forced_retractions import force_retractions
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import ModuleOf, schedules
from tests.helpers.fake_overlap import hash_engine
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule
from tests.helpers.replaced import plant

pytestmark = [pytest.mark.since("m5_overlap"), pytest.mark.streams, pytest.mark.cpu]

SCHEDULES = schedules(1100)  # on each of the two streams
STREAMS = (LateStream, EarlyStream)


def fuzz(module: ModuleType, seed: int, stream: type[LateStream], **config: Any) -> Any:
    """Run one random schedule: arrivals, stops, aborts, forced retractions, pools of few pages."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance, (1, 2, 3, 4, 16))
    engine = hash_engine(
        module, stream(), num_pages, page_size=page_size, max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.choice([1, 2, 3, 5, 16, 17, 64]), **config,
    )  # fmt: skip
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 1, 2, 7]))

    def add() -> tuple[str, list[int]]:
        return add_random(engine, chance, random_prompt(chance, longest))

    run_schedule(engine, chance, add, chance.randint(1, 10), arrivals=0.4)
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


def freed_at_once(_: Any, self: Any, request: Any) -> None:
    self.kv_cache.free(request)


def useless_step(_: Any, running: list[Any]) -> list[Any]:
    """No request is known to end."""
    return list(running)


def stale_lengths(advance: Any, self: Any, batch: Any) -> None:
    advance(self, batch)
    for request in batch.requests:
        request.num_computed_tokens -= bool(request.num_computed_tokens > 3)


def one_future_for_all_rows(_: Any, row: int) -> int:
    return -1


def positive_placeholder(_: Any, row: int) -> int:
    return row + 1


def token_after_the_end(update: Any, self: Any, batch: Any, sampled: Any) -> Any:
    reasons = {r: r.finish_reason for r in batch.requests}
    for request in batch.requests:
        request.finish_reason = None
    try:
        return update(self, batch, sampled)
    finally:
        for request, reason in reasons.items():
            request.finish_reason = request.finish_reason or reason


def retracted_in_flight(force: Any, scheduler: Any, every: int | None) -> None:
    force(scheduler, every)
    scheduler.needs_result = lambda: False


@pytest.mark.parametrize(
    ("place", "mistake", "streams"),
    [
        # The early stream writes before any page is freed.
        ("in_flight.StepsInFlight.free", freed_at_once, [LateStream]),
        ("scheduler.continuing", useless_step, STREAMS),
        ("in_flight.StepsInFlight.advance", stale_lengths, STREAMS),
        ("in_flight.placeholder", one_future_for_all_rows, STREAMS),
        ("in_flight.placeholder", positive_placeholder, STREAMS),
        ("scheduler.Scheduler.update_from_output", token_after_the_end, STREAMS),
        ("", retracted_in_flight, STREAMS),
    ],
)
@pytest.mark.before("speculative")
def test_planted_bugs_are_caught(
    module_of: ModuleOf,
    code_of: ModuleOf,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    mistake: Any,
    streams: Sequence[type[LateStream]],
) -> None:
    """The fuzz can fail: it finds each of these bugs within 60 schedules."""
    module, _, name = place.partition(".")
    if not place:
        plant(monkeypatch, f"{__name__}.force_retractions", mistake)
    elif "." in name:
        plant(monkeypatch, f"{module_of(module).__name__}.{name}", mistake)
    else:  # an elective's own methods may call the function, too
        for owner in {code_of(module), module_of(module)}:
            if hasattr(owner, name):
                plant(monkeypatch, f"{owner.__name__}.{name}", mistake)
    for stream in streams:
        with pytest.raises((AssertionError, KeyError, ValueError, IndexError)):
            for seed in range(60):
                fuzz(module_of("engine"), seed, stream)
