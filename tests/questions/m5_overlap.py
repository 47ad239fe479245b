"""The questions of m5: the worker, futures, steps in flight, buffers, static steps, the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any

import torch

from m5_overlap import engine as engine_module
from m5_overlap.buffers import ALIGNMENT, StepBuffers
from m5_overlap.cuda_graph import DecodeGraphs
from m5_overlap.future_map import FutureMap
from m5_overlap.model_input import BatchDescriptor
from m5_overlap.placeholders import PADDING_INDEX, future_index, placeholder
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.engine.test_overlap import fuzz
from tests.exercises.by_hand import make_request, watch
from tests.exercises.overlap_states import plan, running, steps_in_flight
from tests.exercises.test_m5_1 import run, worker_of
from tests.exercises.test_m5_4 import CPU, launched
from tests.exercises.test_m5_5 import batch_of, decodes, make_runner
from tests.exercises.test_m5_6 import engine_of, in_flight, scheduler_of
from tests.helpers.oracle import greedy

Asked = Iterator[tuple[str, str, Any]]


def worker(chance: Random) -> Asked:
    seen: list[Any] = []
    fails = [chance.random() < 0.15 for _ in range(7)]
    numbers = [chance.randrange(1000) for _ in fails]
    events: list[Any] = []

    def work(index: int) -> None:
        seen.append([numbers[index], [event.done.is_set() for event in events]])
        if fails[index]:
            raise chance.choice([KeyError, ZeroDivisionError, KeyboardInterrupt])

    works: list[Callable[[], None]] = [partial(work, i) for i in range(len(fails))]
    one, events = worker_of(*works)
    run(one)
    about = f"work {numbers}, of which fail: {fails}"
    yield "what runs before which event", about, seen
    for number, event in zip(numbers, events, strict=True):
        try:
            event.wait()
            ended = "done"
        except TimeoutError:  # the time limit of this question: the event is never set
            raise
        except BaseException as error:
            ended = type(error).__name__
        yield "the events", f"work {number}; {about}", [ended, event.done.is_set()]
    yield "spans", about, len(one.spans)


def futures(chance: Random) -> Asked:
    num_rows = chance.randint(3, 9)
    tokens = FutureMap(num_rows, CPU)
    for _ in range(4):
        rows = chance.sample(range(num_rows), chance.randint(1, num_rows))
        values = [chance.randrange(50_000) for _ in [*rows, "padding"]]
        indices = [*map(future_index, rows), PADDING_INDEX]
        tokens.store(torch.tensor(indices), torch.tensor(values))
        ids = [
            chance.choice([placeholder(chance.randrange(num_rows)), chance.randrange(50_000), 0])
            for _ in range(8)
        ]
        about = f"resolve({ids}) after {values} in rows {rows}"
        yield "resolve", about, tokens.resolve(torch.tensor([ids]))
    steps = steps_in_flight()
    requests = [
        running(steps, name, [1] * chance.randint(3, 9), chance.randint(0, 2)) for name in "abc"
    ]
    batch = plan(
        steps,
        *(
            (r, chance.randint(1, r.num_tokens - r.num_computed_tokens))
            for r in chance.sample(requests, len(requests))  # a row is not a place in the batch
        ),
    )
    if chance.random() < 0.5:
        chance.choice(requests).finish_reason = "stop"
    steps.advance(batch)
    about = f"advance of {list(batch.num_scheduled_tokens)} tokens"
    yield "lengths after advance", about, [r.num_computed_tokens for r in requests]
    yield "tokens after advance", about, [r.token_ids for r in requests]


def in_order(chance: Random) -> Asked:
    steps = steps_in_flight()
    requests = [
        running(steps, name, [chance.randrange(90) for _ in range(chance.randint(5, 9))], computed)
        for name, computed in zip("abc", chance.sample(range(4), 3), strict=True)
    ]

    def planned() -> Any:
        live = [r for r in requests if not r.is_finished and r.num_tokens > r.num_computed_tokens]
        chosen = [r for r in live if chance.random() < 0.8]
        most = [r.num_tokens - r.num_computed_tokens for r in chosen]
        return plan(steps, *((r, chance.randint(1, m)) for r, m in zip(chosen, most, strict=True)))

    first = planned()
    steps.advance(first)
    second = planned()
    for request in requests:
        if chance.random() < 0.4:
            request.finish_reason = "stop"
            steps.free(request)
    acts = [(steps.undo, second), (steps.undo, first)]
    if chance.random() < 0.6:
        acts = [(steps.complete, first), (steps.complete, second)]
    for act, batch in acts:
        if batch is second and act == steps.complete:
            steps.advance(batch)
        act(batch)
        live = [r for r in requests if not r.is_finished]
        about = f"{act.__name__} of a step of {[r.request_id for r in batch.requests]}"
        state = [[r.request_id, r.num_computed_tokens, r.token_ids] for r in live]
        yield "tokens", about, [state, [r.token_ids for r in requests if r.is_finished]]
        held = [[r.row for r in requests], [r.request_id for r in steps.finished]]
        yield "rows and pages", about, [held, steps.kv_cache.num_free_pages]
        yield "steps in flight", about, [[r.request_id for r in b.requests] for b in steps.batches]


def buffers(chance: Random) -> Asked:
    mine = [StepBuffers(CPU, size=chance.choice([64, 256, 4096])) for _ in range(2)]
    stream, results, seen = LateStream(), [], []  # type: Any, list[Any], list[Any]
    for number in range(6):
        buffer: Any = mine[number % 2]
        buffer.begin()
        sizes = [chance.randint(1, 40) for _ in range(chance.randint(1, 4))]
        tensors = [torch.tensor([chance.randrange(999) for _ in range(n)]) for n in sizes]
        taken = [buffer.upload(tensor) for tensor in tensors]
        start = taken[-1].data_ptr() - buffer.memory.data_ptr()
        yield "uploads", f"step {number} uploads {sizes} numbers", taken
        yield "alignment", f"step {number} uploads {sizes} numbers", start % ALIGNMENT
        tokens = [chance.randrange(999) for _ in range(3)]
        results.append(launched(stream, buffer, tokens))
        # As in the engine, a result is read before its buffer has another step.
        if len(results) == 2 or chance.random() < 0.4:
            done = results.pop(0)
            yield "results", f"before step {number + 1}", done.wait()
            yield "waits", f"before step {number + 1}", stream.num_waits
    yield "waits", "at the end", stream.num_waits
    for number in range(4):  # steps without a result: only `begin` waits for them
        buffer = mine[number % 2]
        buffer.begin()
        pieces = [buffer.upload(torch.tensor([chance.randrange(999)])) for _ in range(3)]
        buffer.in_use = stream.launch(partial(lambda x: seen.append([p.item() for p in x]), pieces))
        yield "waits", f"before step {number} without a result", stream.num_waits
    stream.synchronize()
    yield "what each step has read", "steps without a result", seen


def static_steps(chance: Random) -> Asked:
    runner = make_runner()
    sizes = sorted(chance.sample(range(1, 40), 5))
    graphs = DecodeGraphs(torch.Tensor, sizes, 8, capture=False)
    numbers = [chance.randint(1, 45) for _ in range(4)]
    chosen = [graphs.dispatch(decodes(n)) for n in numbers]
    about = f"dispatch {numbers} of {sizes}"
    yield "the choice of a graph", about, [(mode.name, key.num_reqs) for mode, key in chosen]

    def padded(count: int) -> Any:
        parts = []
        for row in chance.sample(range(8), count):
            computed = chance.randint(0, 11)
            tokens = [chance.randrange(90) for _ in range(computed + 1)]
            request = make_request(f"row {row}", tokens)
            request.row, request.num_computed_tokens = row, computed
            pages = torch.tensor(chance.sample(range(1, 20), 3), dtype=torch.int32)
            runner.inputs.page_table[row + 1, :3] = pages
            parts.append((request, 1))
        return runner.inputs.prepare(batch_of(*parts), BatchDescriptor(4))

    def fields(inputs: Any, count: int) -> list[Any]:
        meta = inputs.metadata
        return [
            inputs.input_ids, inputs.position_ids, meta.slot_mapping[:count], meta.seq_lens,
            meta.seq_lens_cpu, meta.page_table[:, :3], meta.page_table.shape,
        ]  # fmt: skip

    step = None
    for _ in range(3):
        count = chance.randint(1, 4)
        inputs = padded(count)
        about = f"{count} decodes, padded to 4"
        yield "a padded batch", about, fields(inputs, count)
        if step is None:
            step = runner.graphs._make(inputs)
            meta = step.inputs.metadata
            static = [step.inputs.input_ids, meta.seq_lens]  # a graph reads these
        step.fill(inputs)
        yield "the static step after fill", about, [fields(step.inputs, count), *static]


def loop(chance: Random) -> Asked:
    stream: Any = chance.choice([LateStream, EarlyStream])()
    events: list[str] = []
    engine = engine_of(stream, num_pages=200, max_num_seqs=3, page_size=chance.choice([1, 2, 4]))
    watch(engine.core.runner, "launch", lambda *_: events.append("launch"))
    watch(stream, "run_until", lambda _: events.append("wait"))
    for i in range(chance.randint(1, 5)):
        prompt = [chance.randrange(50) for _ in range(chance.randint(1, 12))]
        params = greedy(chance.randint(1, 7), ignore_eos=True)
        engine.add_request(prompt, params, f"{i}")
    number = 0
    while engine.has_unfinished_requests():
        number += 1
        outputs = {o.request_id: [o.finished, o.outputs[0].token_ids] for o in engine.step()}
        counted = [engine.core.runner.num_launches, engine.stats().num_steps, stream.num_waits]
        yield "outputs", f"step {number}", outputs
        yield "launches and waits", f"step {number}", [counted, events]
    counted = [engine.stats().prefill_tokens, engine.stats().decode_tokens]
    yield "counters", "at the end", counted
    scheduler = scheduler_of(num_pages=chance.randint(4, 9))
    scheduler.admission.new_token_ratio = 0.0
    prompts = [[chance.randrange(9)] * chance.randint(1, 4) for _ in range(3)]
    in_flight(scheduler, *prompts, max_tokens=chance.choice([1, 20]))
    yield "short memory", f"needs_result with {prompts} in flight", scheduler.needs_result()
    size = chance.randint(3, 9)
    scheduler = scheduler_of(num_pages=30, max_num_batched_tokens=size)
    prompts = [[chance.randrange(9) for _ in range(chance.randint(1, 5))] for _ in range(3)]
    in_flight(scheduler, *prompts, max_tokens=chance.choice([1, 2, 20]))
    for number in range(3):
        [batch] = scheduler.in_flight.batches
        requests = list(batch.requests)
        if chance.random() < 0.5 and not requests[0].is_finished:
            scheduler.finish_request(requests[0], "abort")
        tokens: Any = [(100 + place, None) for place in range(len(batch.sampled_indices))]
        ended = scheduler.update_from_output(batch, tokens)
        about = f"update_from_output of step {number} of {prompts}, {size} tokens a step"
        yield "results of a step", about, [
            [[o.request.request_id, list(o.new_tokens), o.finish_reason] for o in ended],
            [[r.token_ids, r.num_computed_tokens, r.row is None] for r in requests],
            [r.request_id for r in scheduler.running],
        ]  # fmt: skip
        yield "counters", about, asdict(scheduler.counters)
        in_flight(scheduler)
        if not scheduler.in_flight.batches:
            break
    done = fuzz(engine_module, chance.getrandbits(30), type(stream))
    yield "short memory", "a random schedule", done.stats().num_running


QUESTIONS = {
    "m5.1": (worker, 100), "m5.2": (futures, 100), "m5.3": (in_order, 400), "m5.4": (buffers, 60),
    "m5.5": (static_steps, 36), "m5.6": (loop, 120),
}  # fmt: skip
