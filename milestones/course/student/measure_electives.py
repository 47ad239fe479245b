"""Measurements of electives that count pages, tokens and steps: the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from common import (
    EngineConfig,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
    load_model,
)
from common.displays.workload import percentile

from ...chain import load, short
from .measuring import Row, lower_engine, prompts_of

POOL = 96  # pages of priority's pool


def by_length(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """hybrid_memory: the pages of a request with a prompt of that many tokens, after its steps.

    They are counted in all groups together. Full attention would hold its pages in each group.
    """
    longest = int(max(sizes)) + 9 + 1
    config = EngineConfig(
        model=model, device="cpu", max_model_len=longest, page_size=8,
        num_pages=longest // 2, max_num_batched_tokens=32, enable_overlap=False,
    )  # fmt: skip
    loaded = load_model(config)
    for size in map(int, sizes):
        with load(milestone).LLMEngine(config, loaded) as engine:
            groups, kv_cache = engine.core.runner.kv_pool.groups, engine.core.scheduler.kv_cache
            params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
            engine.add_request(prompts_of([size])[0], params)
            held = [0]
            while engine.has_unfinished_requests():
                engine.step()
                for request in engine.core.scheduler.running:
                    full = len(kv_cache.pages_of(request)) * len(groups)
                    held.append(kv_cache.num_pages_of(request))
        yield f"{size}", f"{full}", f"{max(held)}", f"{held[-1]}", f"{held[-1] / full:.2f}"


def by_budget(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """embedding: eight texts, alone and beside twelve vectors of prompts with 120 tokens.

    sizes: tokens of a step. Steps and tokens do not depend on the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size, num_vectors in product(map(int, sizes), (0, 12)):
        config = EngineConfig(
            model=model, device="cpu", max_num_seqs=16, max_model_len=128, page_size=4,
            num_pages=600, max_num_batched_tokens=size,
        )  # fmt: skip
        with load(milestone).LLMEngine(config, loaded) as engine:
            gaps, waits = steps_beside(engine, prompts_of([120] * num_vectors, 1))
            num_steps = engine.stats().num_steps
        steps, tokens = [gap[0] for gap in gaps], [float(gap[1]) for gap in gaps]
        yield (
            f"{size}", f"{num_vectors}", f"{max(steps)}", f"{percentile(tokens, 50):g}",
            f"{max(tokens):g}", f"{percentile(waits, 50):g}" if waits else "", f"{num_steps}",
        )  # fmt: skip


def steps_beside(
    engine: Any, prompts: list[list[int]]
) -> tuple[list[tuple[int, int]], list[float]]:
    """Run eight texts of 32 tokens, and a vector that arrives every second step.

    Returns the steps, and the computed tokens, between two tokens of a text; and the steps that
    each vector takes.
    """
    last: dict[str, tuple[int, int]] = {}
    gaps: list[tuple[int, int]] = []
    waits: list[float] = []
    arrived: dict[str, int] = {}
    for prompt in prompts_of([8] * 8):
        engine.add_request(prompt, SamplingParams(32, temperature=0, ignore_eos=True))
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        if prompts and step % 2 == 0:
            arrived[engine.add_request(prompts.pop(), PoolingParams("MEAN"))] = step
        outputs, stats = engine.step(), engine.stats()
        place = (stats.num_steps, stats.prefill_tokens + stats.decode_tokens)
        for output in outputs:
            if isinstance(output, PoolingRequestOutput):
                waits.append(step - arrived[output.request_id] + 1)
                continue
            if (before := last.get(output.request_id)) is not None:
                gaps.append((place[0] - before[0], place[1] - before[1]))
            last[output.request_id] = place
    return gaps, waits


def by_urgency(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """priority: urgent requests under load, and conversations that the pool cannot hold.

    Times are in steps, so they do not depend on the machine. sizes: host pages for each page of the
    pool. A copy is taken to be faster than computing its tokens.
    """
    lower = lower_engine(milestone)
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    config = EngineConfig(
        model=model, device="cpu", max_num_seqs=4, max_model_len=128, page_size=4, num_pages=POOL
    )
    loads: dict[str, list[Arrival]] = {
        "urgent": [
            *(Arrival(5 * i, prompt, 1) for i, prompt in enumerate(prompts_of([48] * 24))),
            *(Arrival(20 + 12 * i, prompt, 0) for i, prompt in enumerate(prompts_of([16] * 8, 1))),
        ],
        "turns": [
            Arrival(200 * turn + 24 * i, prompt[: 24 * (turn + 1)], 0)
            for turn in range(3)
            for i, prompt in enumerate(prompts_of([72] * 8, 2))
        ],
    }
    for load_name, arrivals in loads.items():
        for size in (None, *sizes):
            with load(lower if size is None else milestone).LLMEngine(config, loaded) as engine:
                if size is not None:
                    num_host_pages = int(size * POOL)
                    engine.core.scheduler.kv_cache.radix_cache.resize_host(num_host_pages)
                    engine.core.costs.page_seconds = 0.0
                waits = steps_to_first_token(engine, arrivals, has_priorities=size is not None)
                stats = engine.stats()
                preemption = getattr(engine.core.scheduler, "preemption", None)
                loaded_pages = getattr(engine.core.scheduler.kv_cache.radix_cache, "num_loaded", 0)
            urgent, others = ([w for w, p in waits if p == level] for level in (0, 1))
            yield (
                load_name, short(lower) if size is None else f"host x {size:g}",
                f"{percentile(urgent, 50):g}", f"{percentile(urgent, 95):g}",
                f"{percentile(others, 50):g}" if others else "", f"{stats.num_steps}",
                f"{stats.prefill_tokens + stats.decode_tokens}", f"{stats.cached_prompt_tokens}",
                f"{getattr(preemption, 'num_preemptions', 0)}", f"{loaded_pages}",
            )  # fmt: skip


class Arrival(NamedTuple):
    """A request that arrives before a step."""

    step: int
    prompt: list[int]
    priority: int


def steps_to_first_token(
    engine: Any, arrivals: list[Arrival], has_priorities: bool
) -> list[tuple[float, int]]:
    """Run requests of 16 output tokens. Return the steps that each waits, and its priority."""
    waits: dict[str, tuple[float, int]] = {}
    coming, started, step = sorted(arrivals), dict[str, Arrival](), 0
    while coming or engine.has_unfinished_requests():
        while coming and coming[0].step <= step:
            arrival = coming.pop(0)
            more = {"priority": arrival.priority} if has_priorities else {}
            params = SamplingParams(16, temperature=0, ignore_eos=True)
            started[engine.add_request(arrival.prompt, params, **more)] = arrival
        step += 1
        for output in engine.step():
            arrival = started[output.request_id]
            waits.setdefault(output.request_id, (step - arrival.step, arrival.priority))
    return list(waits.values())
