"""The questions of m3: pages, the flat batch, admission, retraction, the schedule, the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from m3_paged.admission import CLIP_MAX_NEW_TOKENS
from m3_paged.schedule_batch import ScheduleBatch
from tests.exercises.by_hand import make_request, names, scheduled
from tests.exercises.paged_states import make_scheduler, run, show, wait
from tests.exercises.test_m3_1 import manager_with
from tests.exercises.test_m3_2 import make_runner
from tests.exercises.test_m3_5 import make_fake
from tests.exercises.test_m3_6 import Decode

Asked = Iterator[tuple[str, str, Any]]


def pages(chance: Random) -> Asked:
    size = chance.choice([1, 2, 3, 4, 16])
    manager, requests = manager_with("A", "B", "C", pages=40, size=size)
    for _ in range(8):
        request = chance.choice(requests)
        before, held = request.num_computed_tokens, list(manager.pages_of(request))
        # Together they fit: 3 requests of at most 12 pages.
        request.num_computed_tokens = chance.randint(0, 12 * size)
        manager.free_slots(request, request.num_computed_tokens)
        left = len(manager.pages_of(request))
        manager.allocate_slots(request, request.num_computed_tokens)
        now = list(manager.pages_of(request))
        stayed = sum(a == b for a, b in zip(held, now, strict=False))
        owned = [page for row in manager.table.rows for page in row]
        rooms = [manager.available_slots(r) for r in requests]
        about = (
            f"{request.request_id} of {before} tokens gets {request.num_computed_tokens}, "
            f"page_size={size}"
        )
        yield "pages after a free", about, left
        yield "pages after an allocation", about, [len(now), stayed]
        yield "all pages", about, [len(set(owned)), manager.num_free_pages]
        yield "room for more tokens", about, rooms


def flat(chance: Random) -> Asked:
    size = chance.choice([1, 2, 4, 16])
    runner = make_runner(size)
    requests, starts, counts, sampled = [], [], [], []
    for i, row in enumerate(chance.sample(range(4), chance.choice([1, 2, 3, 4, 4]))):
        length = chance.randint(1, min(30, 5 * size))
        start = length - 1 if chance.random() < 0.2 else chance.randrange(length)
        requests.append(
            make_request(f"{row}", [chance.randrange(1, 90) for _ in range(length)], computed=start)
        )
        requests[-1].row = row
        starts.append(start)
        counts.append(chance.choice([1, chance.randint(1, length - start)]))
        sampled += [i] if start + counts[-1] == length else []
        width = -(-length // size)
        first = chance.choice([1, 1, 200_000_000])  # its slots are too large for 32 bits
        pages = chance.sample(range(first, first + 20), width)
        runner.inputs.page_table[row, :width] = torch.tensor(pages)
    # Decodes come first. The last token of a chunk may come after a longer chunk.
    order = sorted(range(len(counts)), key=lambda i: len(requests[i].token_ids) - starts[i] > 1)
    places = {old: new for new, old in enumerate(order)}
    batch = ScheduleBatch(
        [requests[i] for i in order], [counts[i] for i in order], sorted(places[i] for i in sampled)
    )
    inputs = runner.inputs.prepare(batch)
    meta = inputs.metadata
    about = f"prepare: {scheduled(batch)}, page_size={size}"
    yield "the tokens", about, [inputs.input_ids.flatten(), inputs.position_ids.flatten()]
    yield "the slots", about, [meta.slot_mapping, inputs.logits_indices]
    yield "the lengths", about, [
        meta.seq_lens, meta.seq_lens_cpu, meta.query_start_loc, meta.query_lens_cpu,
        meta.num_decodes,
    ]  # fmt: skip
    tensors = [meta.page_table, meta.slot_mapping, meta.query_start_loc, meta.seq_lens]
    yield "the types", about, [f"{tensor.dtype}" for tensor in tensors]
    yield "the shape of the page table", about, list(meta.page_table.shape)


def admission(chance: Random) -> Asked:
    config = {
        "max_num_seqs": chance.randint(2, 5), "max_num_batched_tokens": chance.randint(8, 24),
    }  # fmt: skip
    running = "ABC"[: chance.randint(0, min(3, config["max_num_seqs"]))]
    scheduler = make_scheduler(5 * len(running) + chance.randint(1, 30), **config)
    for name in running:
        run(scheduler, name, chance.randint(1, 20), max_tokens=chance.randint(1, 60))
    for i in range(5):
        most = chance.choice([chance.randint(1, 60), 9 * CLIP_MAX_NEW_TOKENS])
        length = chance.randint(1, 60)
        request = make_request(f"X{i}", length, max_tokens=most, max_model_len=length + most)
        scheduled_tokens = chance.randint(0, 24)
        before = make_request("before", max(1, scheduled_tokens))
        batch = ScheduleBatch([before], [scheduled_tokens], [])
        got = scheduler.admission
        got.new_token_ratio = chance.randint(0, 10) / 10
        about = f"{request.num_tokens} tokens, at most {request.max_num_tokens}"
        ratio = f"{about}, ratio {got.new_token_ratio}"
        yield "expected pages", ratio, got.expected_pages(request)
        # How an expectation is rounded is a question of its own: here none has a fraction.
        got.new_token_ratio = chance.choice([0.0, 1.0])
        ratio = f"{about}, ratio {got.new_token_ratio}; {show(scheduler)}"
        yield "does the memory last", ratio, got.fits(request, scheduler.running)
        budget = f"{scheduled_tokens} tokens are scheduled; {config}; {show(scheduler)}"
        yield "a row and a token", budget, got.budget_state(batch).name


def retraction(chance: Random) -> Asked:
    lengths = [chance.randint(1, 24) for _ in range(chance.randint(2, 6))]
    needed = sum(-(-n // 4) for n in lengths)
    scheduler = make_scheduler(needed + chance.choice([0, 0, 0, 1]))
    scheduler.admission.new_token_ratio = 0.9
    requests = [run(scheduler, "ABCDEF"[i], n, max_tokens=90) for i, n in enumerate(lengths)]
    if chance.random() < 0.5:
        requests.append(run(scheduler, "N", 6, output=0, computed=0, max_tokens=90))
    for name in "XY":
        wait(scheduler, name, 3)
    for request in chance.sample(requests, 2):
        if request.row is None:
            continue
        before = show(scheduler)
        scheduler.retract_for(request)
        room = None if request.row is None else scheduler.kv_cache.available_slots(request)
        about = f"retract_for({request.request_id}); {before}"
        yield "which requests run", about, names(scheduler.running)
        yield "the order of the queue", about, names(scheduler.waiting)
        yield "computed tokens", about, [r.num_computed_tokens for r in requests]
        free, count = scheduler.kv_cache.num_free_pages, scheduler.counters.num_retractions
        yield "pages and retractions", about, [free, count, room]
        if room:  # as a step: the request gets its page
            scheduler.kv_cache.allocate_slots(request, request.num_computed_tokens + 1)


def schedule(chance: Random) -> Asked:
    scheduler = make_scheduler(
        200, max_num_batched_tokens=chance.randint(6, 40), max_num_seqs=chance.randint(4, 8)
    )
    for name in chance.sample("ABCD", chance.randint(0, 4)):
        length = chance.randint(1, 30)
        if chance.random() < 0.5:
            run(scheduler, name, length)
        else:
            run(scheduler, name, length, output=0, computed=chance.randrange(length))
    for name in "XYZ"[: chance.randint(0, 3)]:
        wait(scheduler, name, chance.randint(1, 30))
    for _ in range(3):
        before = show(scheduler)
        batch = scheduler.schedule()
        sampled = names(batch.requests[i] for i in batch.sampled_indices)
        held = {r.request_id: len(scheduler.kv_cache.pages_of(r)) for r in scheduler.running}
        about = f"schedule(); {before}"
        yield "steps", about, [scheduled(batch), names(scheduler.waiting), held]
        yield "which requests get a token", about, sampled
        scheduler.update_from_output(batch, [(9, None)] * len(batch.sampled_indices))
    full = make_scheduler(12)
    full.admission.new_token_ratio = 1.0
    run(full, "A", chance.randint(1, 8))
    for name in "XY"[: chance.randint(0, 2)]:
        wait(full, name, chance.randint(1, 4), max_tokens=chance.randint(1, 4))
    wait(full, "BIG", chance.randint(28, 36))
    wait(full, "small", chance.randint(1, 4), max_tokens=1)
    about = f"schedule(); {show(full)}"
    yield "a queue that waits for memory", about, [scheduled(full.schedule()), names(full.waiting)]
    engine = make_fake(
        chance.randint(16, 24), page_size=chance.choice([2, 3, 4]), max_num_batched_tokens=16
    )
    for name in "abc":
        engine.add(name, [chance.randrange(50) for _ in range(chance.randint(1, 20))], 9)
    for _ in range(500):
        if engine.live:
            engine.step()
    yield "a run with little memory", "tokens of all requests", engine.finished


def kernel(chance: Random) -> Asked:
    group, kv_heads = chance.choice([(1, 2), *[(2, 2), (3, 1)] * 3, (4, 1)])
    contexts = [chance.randint(1, 60) for _ in range(chance.randint(1, 3))]
    if chance.random() < 0.2:
        contexts.append(chance.randint(250, 300))
    size, dim = chance.choice([1, 3, 4, 16]), chance.choice([16, 24, 32])
    decode = Decode(*contexts, heads=(group * kv_heads, kv_heads), dim=dim, page_size=size)
    decode.query *= 1 + chance.random()
    about = f"contexts {contexts}, {group} query heads for each KV head, page_size={size}, {dim=}"
    yield "outputs", about, decode.got()[:, :, :5].double()


QUESTIONS = {
    "m3.1": (pages, 30), "m3.2": (flat, 80), "m3.3": (admission, 60), "m3.4": (retraction, 60),
    "m3.5": (schedule, 60), "m3.6": (kernel, 24),
}  # fmt: skip
