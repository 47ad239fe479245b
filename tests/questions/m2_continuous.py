"""The questions of m2: rows, steps, the padded batch, the memory, and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from m2_continuous.kv_cache import KVCacheManager, Move
from m2_continuous.schedule_batch import ScheduleBatch
from tests.conftest import build_engine
from tests.exercises.by_hand import failing_step, make_request, names, scheduled
from tests.exercises.test_m2_2 import make_scheduler
from tests.exercises.test_m2_3 import of, show, state
from tests.exercises.test_m2_4 import prepare, sees
from tests.exercises.test_m2_5 import TOKENS, make_pool, step
from tests.helpers.oracle import greedy

Asked = Iterator[tuple[str, str, Any]]


def rows(chance: Random) -> Asked:
    manager = KVCacheManager(5, 100)
    for i in range(14):
        before = f"rows: {names(manager.rows)}"
        if manager.rows and (not manager.has_free_row or chance.random() < 0.5):
            request = chance.choice(manager.rows)
            manager.free(request)
            what = f"free({request.request_id}); {before}"
        else:
            computed = chance.randint(1, 40)
            request = make_request(f"r{i}", computed, output=1, computed=computed)
            manager.allocate(request)
            what = f"allocate({request.request_id}); {before}"
        moves = [tuple(move) for move in manager.moves]
        manager.moves.clear()
        owners = [[r.request_id, r.row] for r in manager.rows]
        yield "rows", what, [owners, request.row]
        yield "moves", what, moves


def schedule(chance: Random) -> Asked:
    lengths = [chance.randint(1, 20) for _ in range(chance.randint(0, 6))]
    running = " ".join("ABCD"[: chance.randint(0, 4)])
    config = {
        "max_num_batched_tokens": chance.randint(20, 60), "max_num_seqs": chance.randint(4, 10),
    }  # fmt: skip
    scheduler = make_scheduler(*lengths, running=running, **config)
    chance.shuffle(scheduler.kv_cache.rows)
    for row, request in enumerate(scheduler.kv_cache.rows):
        request.row = row
    for turn in range(3):
        about = f"schedule() number {turn}: prompts {lengths} wait, {running} run; {config}"
        batch = scheduler.schedule()
        yield "the batch", about, scheduled(batch)
        queues = [names(scheduler.running), names(scheduler.waiting)]
        yield "the queues and rows", about, [*queues, names(scheduler.kv_cache.rows)]
        for request, count in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            request.num_computed_tokens += count
            request.token_ids.append(9)


def removal(chance: Random) -> Asked:
    running = "ABCDE"[: chance.randint(1, 5)]
    joined = "0123"[: chance.randint(0, 3)]
    scheduler = state(" ".join(running), "X Y Z", " ".join(joined))
    parts = [of(scheduler, name) for name in joined] if joined else list(scheduler.running)
    act = chance.choice(["a step is undone", "a request is sent back", "a request ends"])
    if act == "a step is undone":
        scheduler.undo(ScheduleBatch(parts, [3 if joined else 1] * len(parts)))
        about = f"undo of {names(parts)}; {running} ran"
        yield act, about, [show(scheduler), [r.row for r in parts]]
        return
    chosen = [*running, "X", "Y", "Z"] if act == "a request ends" else [*running]
    for name in chance.sample(chosen, min(3, len(chosen))):
        before, request = show(scheduler), of(scheduler, name)
        now: list[Any]
        if act == "a request ends":
            scheduler.finish_request(request, chance.choice(["length", "abort"]))
            what, now = f"finish_request({name}); {before}", [request.finish_reason]
        else:
            scheduler.send_back(request)
            what, now = f"send_back({name}); {before}", [request.num_computed_tokens]
        moves = [tuple(move) for move in scheduler.kv_cache.moves]
        yield act, what, [show(scheduler), moves, request.row, *now]


def padded(chance: Random) -> Asked:
    num = chance.randint(1, 4)
    rows = chance.sample(range(8), num)
    if chance.random() < 0.5:
        lengths = [chance.randint(1, 9) for _ in range(num)]
        prompts = [[chance.randrange(1, 90) for _ in range(n)] for n in lengths]
        requests = [make_request(f"{i}", p) for i, p in enumerate(prompts)]
        inputs, about = prepare(requests, lengths, rows), f"prompts {prompts}"
    else:
        computed = [chance.randint(1, 30) for _ in range(num)]
        lengths, rows = [1] * num, list(range(num))
        requests = [make_request(f"{i}", n, output=1, computed=n) for i, n in enumerate(computed)]
        for request in requests:
            request.token_ids[-1] = chance.randrange(1, 90)
        inputs, about = prepare(requests, lengths, rows), f"decodes with {computed} computed"
    positions = inputs.position_ids.expand(num, -1)
    yield "the last tokens", about, inputs.last_token
    yield "rows and widths", about, [inputs.rows, inputs.longest_context, inputs.input_ids.shape]
    for i, length in enumerate(lengths):
        tokens = [inputs.input_ids[i, :length], positions[i, :length]]
        yield "tokens and positions", f"row {i} of {about}", tokens
        visible = [sees(inputs, i, token) for token in range(length)]
        yield "what a token sees", f"row {i} of {about}", visible


def memory(chance: Random) -> Asked:
    pool = make_pool()
    numbers = torch.Generator().manual_seed(chance.getrandbits(40))
    for stored in (*pool.keys, *pool.values):
        stored.copy_(torch.randn(stored.shape, generator=numbers))
    if chance.random() < 0.5:
        yield from moved(chance, pool)
        return
    for _ in range(3):
        num, which = chance.randint(1, 4), chance.randrange(2)
        if chance.random() < 0.5:
            rows, length = chance.sample(range(4), num), chance.randint(1, TOKENS)
            positions = [list(range(length))] * num
        else:
            rows, positions = list(range(num)), [[chance.randrange(1, 10)] for _ in range(num)]
        seen = step(pool, rows, positions, max(map(max, positions)) + 1, which, numbers)
        about = f"update of rows {rows} at {positions}"
        found = [[x.shape, x.double().cumsum(-2).flatten()[-8:]] for _, _, x, _ in seen]
        yield "what attention gets", about, found
        yield "what is stored", about, sums(pool)


def sums(pool: Any) -> list[Any]:
    return [x.double().sum((1, 3)) for x in (*pool.keys, *pool.values)]


def moved(chance: Random, pool: Any) -> Asked:
    for _ in range(3):
        source, target = chance.sample(range(4), 2)
        num_tokens = chance.randint(1, TOKENS)
        pool.move(Move(source, target, num_tokens))
        for stored in (*pool.keys, *pool.values):
            stored[target, :, num_tokens:] = 0  # a move may copy more than it must
        yield "moves", f"after a move from row {source} to row {target}", sums(pool)


def engine(chance: Random) -> Asked:
    config: dict[str, Any] = {
        "max_num_seqs": chance.randint(1, 4), "max_num_batched_tokens": chance.randint(40, 90),
    }  # fmt: skip
    engine: Any = build_engine("m2_continuous", **config)
    to_come, number = chance.randint(2, 6), 0
    while to_come or engine.has_unfinished_requests():
        while to_come and chance.random() < 0.6:
            prompt = [chance.randrange(3, 120) for _ in range(chance.randint(1, 30))]
            params = greedy(chance.randint(1, 6), ignore_eos=True)
            engine.add_request(prompt, params, f"{to_come}")
            to_come -= 1
        number += 1
        fails = chance.random() < 0.2
        outputs = failing_step(engine, chance) if fails else engine.step()
        s = engine.stats()
        counted = [s.num_steps, s.prefill_tokens, s.decode_tokens, s.padding_tokens, s.num_running]
        got = {o.request_id: [o.finished, o.outputs[0].token_ids] for o in outputs}
        about = f"step {number} with {config}"
        yield "outputs", about, got
        yield "counters", about, counted
        yield "used memory", about, s.kv_tokens_used


QUESTIONS = {
    "m2.1": (rows, 40), "m2.2": (schedule, 60), "m2.3": (removal, 100), "m2.4": (padded, 60),
    "m2.5": (memory, 44), "m2.6": (engine, 36),
}  # fmt: skip
