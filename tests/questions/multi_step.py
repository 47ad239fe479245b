"""The questions of multi_step: the steps of a plan, and the end of a request within a plan."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.exercises.by_hand import make_request
from tests.exercises.overlap_states import end
from tests.exercises.test_multi_step_1 import decoding, make_scheduler, plan
from tests.exercises.test_multi_step_2 import planned

Asked = Iterator[tuple[str, str, Any]]


def plans(chance: Random) -> Asked:
    config = {"max_num_batched_tokens": chance.randint(6, 24)}
    num_steps = chance.randint(2, 8)
    num_pages = chance.choice([chance.randint(3, 7), chance.randint(8, 30)])  # often very few
    scheduler = make_scheduler(num_pages, **config)
    scheduler.num_steps = num_steps
    scheduler.admission.new_token_ratio = 0.0
    lengths = [(chance.randint(1, 5), chance.randint(2, 12)) for _ in range(chance.randint(1, 3))]
    about = f"{num_pages} pages, plans of {num_steps} steps, {config}, (prompt, max_tokens) of each"
    decoding(
        scheduler,
        *(make_request(f"r{i}", [i + 1] * n, max_tokens=m) for i, (n, m) in enumerate(lengths)),
    )
    late = (chance.randint(1, min(30, 4 * num_pages - 1)), chance.randint(2, 12))
    if chance.random() < 0.6:
        scheduler.add_request(make_request("late", [*range(50, 50 + late[0])], max_tokens=late[1]))
        about += f" late {late}"
    steps = plan(scheduler)
    pages = [len(scheduler.kv_cache.pages_of(request)) for request in scheduler.running]
    tokens = [len(request.token_ids) for request in scheduler.running]
    about = f"{about} {lengths}"
    yield "the steps of a plan", about, [steps, len(scheduler.in_flight.batches)]
    yield "pages", about, pages
    yield "placeholders", about, tokens


def ends(chance: Random) -> Asked:
    num_steps, early = chance.randint(2, 6), chance.randint(0, 5)
    steps, (a, b) = planned(num_steps, "a", "b")
    steps.retreat()
    about = f"a plan of {num_steps} steps; a ends after {early} of them"
    retreated = [a.token_ids, a.num_computed_tokens, b.token_ids]
    yield "retreat", about, retreated
    for number in range(num_steps):
        if number == early:
            end(steps, a)
        held = sorted((r.request_id, n) for r, n in steps.planned.items())
        freed = [a.row is None, len(steps.kv_cache.free_rows)]
        yield "when memory becomes free", f"{about}; {number} completed", freed
        yield "planned tokens", f"{about}; {number} completed", held
        batch = steps.batches[0]
        steps.advance(batch)
        steps.complete(batch)
        for request in batch.sampled_requests:
            if not request.is_finished:
                request.token_ids.append(7)  # the token that the step computed
    freed = [a.row is None, len(steps.finished), b.num_computed_tokens]
    yield "when memory becomes free", f"{about}; completed", freed


QUESTIONS = {"multi_step.1": (plans, 200), "multi_step.2": (ends, 60)}
