"""The questions of embedding: vectors of random chunks, and random texts and vectors together."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from common import PoolingParams
from milestones.electives.embedding import engine as engine_module
from milestones.electives.embedding import pooling
from milestones.electives.embedding.in_flight import continuing
from milestones.electives.embedding.pooling_request import PoolingRequest
from milestones.electives.embedding.schedule_batch import ScheduleBatch
from milestones.lab.instruments.streams import LateStream
from tests.exercises.by_hand import make_request
from tests.exercises.test_embedding_1 import pooling_request
from tests.helpers.fake_overlap import hash_engine
from tests.helpers.oracle import greedy

Asked = Iterator[tuple[str, str, Any]]
KINDS = ("LAST", "MEAN")


def shown(tensor: torch.Tensor) -> list[Any]:
    """Return the numbers of a tensor as text: there are also numbers that are not finite."""
    return [f"{value:.3f}" for value in tensor.flatten().tolist()]


def vectors(chance: Random) -> Asked:
    """Pool random states in random chunks. Then the request is retracted, and computed again."""
    for dtype in (torch.float32, torch.float16):
        states = torch.tensor(
            [
                [chance.choice([1.5, -3.0]), *(chance.choice([0.0, 1.5, 900.25]) for _ in range(3))]
                for _ in range(160)  # no vector is all zeros: these are asked for below
            ]
        ).to(dtype)
        ends = sorted(chance.sample(range(1, 160), 3))
        slices = [slice(a, b) for a, b in zip([0, *ends], [*ends, 160], strict=True)]
        rows = pooling.pool(states, slices)
        yield "rows of a step", f"{dtype}, {slices}", [f"{rows.dtype}", shown(rows)]
        for kind in KINDS:
            params = {"normalize": chance.random() < 0.5, "dimensions": chance.choice([None, 2])}
            request = pooling_request("a", [1] * 160, kind, **params)
            for attempt in range(2):
                for part, row in zip(slices, rows, strict=True):
                    pooling.accumulate(request, row, part.start)
                about = f"{params}, attempt {attempt}"
                yield f"{kind} vectors", about, shown(pooling.embedding(request))
        yield "rows of a step", "they have not changed", shown(rows)
    for kind in KINDS:
        request = pooling_request("a", [1, 2], kind, normalize=True, dimensions=3)
        for start, factor in ((0, 0.0), (1, chance.choice([0.0, 2.0]))):
            pooling.accumulate(request, factor * torch.tensor([1.0, 2.0, 3.0, 4.0]), start)
        name = f"{kind} vectors" if factor else "vectors of zeros"
        yield name, f"{kind}, {factor}", shown(pooling.embedding(request))


def plans(chance: Random) -> Asked:
    """Plan parts of requests, and ask which of them give hidden states, tokens, and go on."""
    batch, running = ScheduleBatch(), []
    for number in range(8):
        length = chance.randint(1, 9)
        kind = chance.choice([None, *KINDS])
        tokens = [number] * length
        request = make_request(f"{number}", tokens) if kind is None else (
            pooling_request(f"{number}", tokens, kind)
        )  # fmt: skip
        request.num_computed_tokens = chance.randrange(length)
        count = chance.randint(1, length - request.num_computed_tokens)
        batch.add(request, count)
        request.num_computed_tokens += count
        running.append(request)
        about = f"{number}: {kind}, {length} tokens, {request.num_computed_tokens} computed"
        going = [request.request_id for request in continuing(running)]
        places = [batch.pooled_indices[:], batch.sampled_indices[:]]
        yield "what is pooled and sampled", about, places
        yield "requests that go on", about, going


def runs(chance: Random) -> Asked:
    """Run texts and vectors that share prefixes, and abort one of them."""
    yield from plans(chance)
    budget = chance.choice([3, 5, 16])
    engine = hash_engine(
        engine_module, LateStream(), 60, page_size=2, max_num_seqs=3, max_num_batched_tokens=budget
    )
    stem = [chance.randrange(9) for _ in range(8)]
    for number in range(8):
        prompt = [*stem[: chance.choice([0, 4, 8])], *(chance.randrange(9) for _ in range(3))]
        kind = chance.choice([None, *KINDS])
        params: Any = greedy(3, ignore_eos=True)
        params = PoolingParams(kind, normalize=False) if kind else params  # type: ignore[arg-type]
        engine.add_request(prompt, params, f"{number}")
    for step in range(40):
        in_flight = [r for batch in engine.core.scheduler.in_flight.batches for r in batch.requests]
        pooled = [r for r in in_flight if isinstance(r, PoolingRequest)]
        if step % 3 == 1 and pooled:
            engine.abort_request(chance.choice(pooled).request_id)
        found = []
        for output in engine.step():
            outputs = output.outputs
            data = getattr(outputs, "data", None)
            found.append((output.request_id, None if data is None else shown(data)))
        running = [request.request_id for request in engine.core.scheduler.running]
        about = f"budget {budget}, step {step}"
        yield "outputs", about, found
        yield "requests that run", about, running
        yield "computed and cached tokens", about, engine.stats().prefill_tokens
    cached = engine.stats().cached_prompt_tokens
    yield "computed and cached tokens", f"budget {budget}", cached


QUESTIONS = {"embedding.1": (vectors, 24), "embedding.2": (runs, 30)}
