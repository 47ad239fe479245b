"""The questions of m1: the scheduler, the runner on tiny-llama, and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from m1_single.schedule_batch import ScheduleBatch
from m1_single.scheduler import Scheduler
from tests.conftest import build_engine
from tests.exercises.by_hand import failing_step, make_request, names, scheduled
from tests.exercises.test_m1_2 import make_runner, step
from tests.exercises.test_m1_3 import CACHE, counters, make_scheduler, run, update
from tests.helpers.oracle import greedy

Asked = Iterator[tuple[str, str, Any]]


def prompt(chance: Random, longest: int = 12) -> list[int]:
    return [chance.randrange(3, 120) for _ in range(chance.randint(1, longest))]


def schedule(chance: Random) -> Asked:
    scheduler, batch = Scheduler(), ScheduleBatch([], [])
    for i in range(10):
        live = [*scheduler.running, *scheduler.waiting]
        state = f"running: {names(scheduler.running)}; waiting: {names(scheduler.waiting)}"
        act = chance.choice(["add", "add", "schedule", "schedule", "finish"])
        act = "schedule" if i == 9 else act  # there is at least one question
        if act == "add" or not (live or act == "schedule"):
            scheduler.add_request(make_request(f"r{i}", chance.randint(1, 30)))
        elif act == "finish":
            request = chance.choice(live)
            scheduler.finish_request(request, chance.choice(["length", "abort"]))
            about = f"finish_request({request.request_id}); {state}"
            now = [names(scheduler.running), names(scheduler.waiting), request.finish_reason]
            yield "a request that ends", about, now
            yield "the last batch does not change", about, scheduled(batch)
        else:
            batch = scheduler.schedule()
            yield "the batch of a step", f"schedule(); {state}", scheduled(batch)
            now = [names(scheduler.running), names(scheduler.waiting)]
            yield "the queues after a step", f"schedule(); {state}", now
            for request in scheduler.running:
                request.num_computed_tokens = chance.randint(0, request.num_tokens)
                request.token_ids.append(7)


def forward(chance: Random) -> Asked:
    use_cache = chance.random() < 0.8
    runner = make_runner(use_cache)
    requests = [make_request(name, prompt(chance)) for name in "AB"]
    for _ in range(6):
        request = chance.choice(requests)
        if chance.random() < 0.1:
            runner.past_key_values.clear()
            for other in requests:
                other.num_computed_tokens = 0
        before, computed = list(request.token_ids), request.num_computed_tokens
        token, _logprobs = step(runner, request)
        about = f"run of {before}, {computed} computed, use_cache={use_cache}"
        yield "the next token", about, token
        yield "what is cached", about, cached(runner.past_key_values)


def cached(caches: Any) -> dict[str, int]:
    """Return the number of cached tokens of each request that has some."""
    lengths = {request.request_id: cache.get_seq_length() for request, cache in caches.items()}
    return {name: length for name, length in lengths.items() if length}


def outputs_of(outputs: Any) -> list[Any]:
    return [
        [o.request_id, o.finished, o.outputs[0].token_ids, o.outputs[0].finish_reason]
        for o in outputs
    ]


def results(chance: Random) -> Asked:
    use_cache = chance.random() < 0.8
    scheduler, runner = make_scheduler(use_cache), make_runner(use_cache)
    length, most, eos = chance.randint(1, 9), chance.randint(1, 6), 2
    request = run(scheduler, "A", length, most)
    request.stop_token_ids = frozenset([eos])
    scheduler.add_request(make_request("B", 2))
    count = length
    while not request.is_finished:
        token: int | None = eos if chance.random() < 0.1 else chance.randrange(10, 90)
        token = None if chance.random() < 0.05 else token
        output = update(scheduler, request, count, token)
        queues = [names(scheduler.running), names(scheduler.waiting)]
        about = f"update_from_output: {count} tokens, sampled {token}"
        tokens = [list(output.new_tokens), request.token_ids[length:]]
        yield "new tokens, and the end", about, [*tokens, output.finish_reason]
        yield "computed tokens", about, [request.num_computed_tokens, *counters(scheduler)]
        yield "the queues", about, queues
        count = request.num_tokens - request.num_computed_tokens
    kept = make_request("C", 4, computed=4)
    runner.past_key_values.update({request: CACHE, kept: CACHE})
    gone = chance.choice([[request], [request, kept], [make_request("D", 2)]])
    runner.free(gone)
    held = [names(runner.past_key_values), request.num_computed_tokens, kept.num_computed_tokens]
    yield "what free leaves", f"free({names(gone)})", held


def engine(chance: Random) -> Asked:
    engine: Any = build_engine("m1_single")
    for i in range(3):
        engine.add_request(prompt(chance), greedy(chance.randint(1, 6), ignore_eos=True), f"{i}")
    number = 0
    while engine.has_unfinished_requests():
        number += 1
        if chance.random() < 0.3:
            name = f"{chance.randrange(4)}"
            about = f"abort_request({name}) before step {number}"
            yield "outputs and aborts", about, engine.abort_request(name)
        fails = chance.random() < 0.25
        outputs = failing_step(engine, chance) if fails else engine.step()
        stats = engine.stats()
        counted = [stats.num_steps, stats.prefill_tokens, stats.decode_tokens]
        yield "outputs and aborts", f"step {number}", [outputs_of(outputs), counted]
        yield "what is cached", f"step {number}", cached(engine.core.runner.past_key_values)


QUESTIONS = {
    "m1.1": (schedule, 100), "m1.2": (forward, 30), "m1.3": (results, 60), "m1.4": (engine, 40),
}  # fmt: skip
