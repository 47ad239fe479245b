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

Asked = Iterator[tuple[str, Any]]


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
        yield what, [owners, request.row, moves]


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
        now = [names(scheduler.running), names(scheduler.waiting), names(scheduler.kv_cache.rows)]
        yield about, [scheduled(batch), *now]
        for request, count in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            request.num_computed_tokens += count
            request.token_ids.append(9)


def removal(chance: Random) -> Asked:
    running = "ABCDE"[: chance.randint(1, 5)]
    joined = "0123"[: chance.randint(0, 3)]
    scheduler = state(" ".join(running), "X Y Z", " ".join(joined))
    parts = [of(scheduler, name) for name in joined] if joined else list(scheduler.running)
    if chance.random() < 0.5:
        scheduler.undo(ScheduleBatch(parts, [3 if joined else 1] * len(parts)))
        yield f"undo of {names(parts)}; {running} ran", [
            show(scheduler), [r.row for r in parts],
        ]  # fmt: skip
        scheduler.kv_cache.moves.clear()
    for name in chance.sample([*running, "X", "Y", "Z"], 3):
        before, request = show(scheduler), of(scheduler, name)
        now: list[Any]
        if request.row is not None and chance.random() < 0.4:
            scheduler.send_back(request)
            what, now = f"send_back({name}); {before}", [request.num_computed_tokens]
        else:
            scheduler.finish_request(request, chance.choice(["length", "abort"]))
            what, now = f"finish_request({name}); {before}", [request.finish_reason]
        moves = [tuple(move) for move in scheduler.kv_cache.moves]
        yield what, [show(scheduler), moves, request.row, *now]


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
    yield about, [inputs.last_token, inputs.rows, inputs.longest_context, inputs.input_ids.shape]
    for i, length in enumerate(lengths):
        visible = [sees(inputs, i, token) for token in range(length)]
        yield f"row {i} of {about}", [inputs.input_ids[i, :length], positions[i, :length], visible]


def memory(chance: Random) -> Asked:
    pool = make_pool()
    numbers = torch.Generator().manual_seed(chance.getrandbits(40))
    for stored in (*pool.keys, *pool.values):
        stored.copy_(torch.randn(stored.shape, generator=numbers))
    for _ in range(3):
        num, which = chance.randint(1, 4), chance.randrange(2)
        if chance.random() < 0.5:
            rows, length = chance.sample(range(4), num), chance.randint(1, TOKENS)
            positions = [list(range(length))] * num
        else:
            rows, positions = list(range(num)), [[chance.randrange(1, 10)] for _ in range(num)]
        seen = step(pool, rows, positions, max(map(max, positions)) + 1, which, numbers)
        yield (
            f"update of rows {rows} at {positions}",
            [[x.shape, x.double().cumsum(-2).flatten()[-8:]] for _, _, x, _ in seen],
        )
        source, target = chance.sample(range(4), 2)
        num_tokens = chance.randint(1, TOKENS)
        pool.move(Move(source, target, num_tokens))
        for stored in (*pool.keys, *pool.values):
            stored[target, :, num_tokens:] = 0  # a move may copy more than it must
        yield (
            f"after a move from row {source} to row {target}",
            [x.double().sum((1, 3)) for x in (*pool.keys, *pool.values)],
        )


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
        yield f"step {number} with {config}", [got, counted, s.kv_tokens_used]


QUESTIONS = {
    "m2.1": rows, "m2.2": schedule, "m2.3": removal, "m2.4": padded, "m2.5": memory, "m2.6": engine,
}  # fmt: skip
