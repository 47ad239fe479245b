"""Measurements that count pages, tokens and steps. They are the same on every machine."""

from __future__ import annotations

import random
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
from common.displays.workload import Workload, percentile

from ...chain import load, short
from .measuring import Row, lower_engine, measured, prompts_of, short_and_long

POOL = 96  # pages of priority's pool
# A model of a GPU's step, for 8 billion weights in bf16: reading them at 2 TB/s takes 8 ms, and the
# 16 GFLOP of a token take 0.1 ms at 160 TFLOP/s.
STEP_MS, TOKEN_MS = 8.0, 0.1


def by_batching(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m2: requests in static groups, of which each ends before the next begins, and continuous."""
    requests = short_and_long()
    for size in map(int, sizes):
        static = [requests[i : i + size] for i in range(0, len(requests), size)]
        for name, groups in (("static", static), ("continuous", [requests])):
            config = EngineConfig(model=model, device="cpu", max_num_seqs=size, max_model_len=96)
            with load(milestone).LLMEngine(config) as engine:
                for group in groups:
                    for prompt, max_tokens in group:
                        params = SamplingParams(
                            max_tokens=max_tokens, temperature=0, ignore_eos=True
                        )
                        engine.add_request(prompt, params)
                    while engine.has_unfinished_requests():
                        engine.step()
                stats = engine.stats()
            num_tokens = sum(max_tokens for _, max_tokens in requests)
            yield (
                f"{size}", name, f"{stats.num_steps}", f"{stats.padding_tokens}",
                f"{num_tokens / stats.num_steps:.1f}",
            )  # fmt: skip


def by_page_size(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m3: the same requests, in pools of as many tokens, divided into pages of another size."""
    drawn = random.Random(7)
    lengths = [drawn.randint(8, 40) for _ in range(48)]
    wanted = [drawn.randint(4, 24) for _ in lengths]
    for size in map(int, sizes):
        config = {
            "model": model, "max_num_seqs": 48, "max_model_len": 64, "page_size": size,
            "num_pages": 1024 // size, "attention_backend": "torch",
        }  # fmt: skip
        result = measured(milestone, Workload(prompts_of(lengths), wanted, True, config))
        waste = result.kv_waste
        assert waste is not None, "the requests hold memory"
        steps, retractions = result.stats["num_steps"], result.stats["num_retractions"]
        yield f"{size}", f"{result.most_running}", f"{waste:.0%}", f"{steps}", f"{retractions}"


def by_chunk(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m3: a prompt of 480 tokens arrives beside 8 decoding requests. sizes: tokens of a step.

    Times are those of the step model, so they do not depend on the machine.
    """
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    for size in map(int, sizes):
        config = EngineConfig(
            model=model, device="cpu", max_num_seqs=9, max_model_len=512, page_size=16,
            num_pages=100, max_num_batched_tokens=size,
        )  # fmt: skip
        with load(milestone).LLMEngine(config, loaded) as engine:
            for prompt in prompts_of([8] * 8):
                engine.add_request(prompt, SamplingParams(100, temperature=0, ignore_eos=True))
            while any(r.num_output_tokens == 0 for r in engine.core.scheduler.running) or (
                engine.core.scheduler.waiting
            ):
                engine.step()
            name, first, steps = engine.add_request(prompts_of([480], 1)[0]), False, list[int]()
            while not first:
                before = engine.stats()
                outputs, after = engine.step(), engine.stats()
                steps.append(
                    after.prefill_tokens + after.decode_tokens
                    - before.prefill_tokens - before.decode_tokens
                )  # fmt: skip
                first = any(output.request_id == name for output in outputs)
        times = [STEP_MS + TOKEN_MS * num_tokens for num_tokens in steps]
        yield f"{size}", f"{len(steps)}", f"{sum(times):.0f}", f"{max(steps)}", f"{max(times):.0f}"


def by_pool(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m4: three turns of eight users. All prompts begin with the same tokens."""
    [stem] = prompts_of([32], seed=1)
    prompts = [stem + prompt for prompt in prompts_of([16] * 8, seed=2)]
    turns = [prompts_of([12, 12], seed=10 + user) for user in range(8)]
    for size in map(int, sizes):
        config = {
            "model": model, "max_num_seqs": 2, "max_model_len": 128, "page_size": 8,
            "num_pages": size, "attention_backend": "torch",
        }  # fmt: skip
        result = measured(milestone, Workload(prompts, [8] * 8, True, config, follow_ups=turns))
        stats = result.stats
        yield (
            f"{size}", f"{8 * size}", f"{result.hit_rate:.0%}", f"{stats['prefill_tokens']}"
        )  # fmt: skip


def by_prefix(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """m4: a decode step of 16 requests that have a prefix in common and 16 tokens of their own.

    Attention reads the pages of each row, also those that rows share.
    """
    config = EngineConfig(
        model=model, device="cpu", max_model_len=512, page_size=16, num_pages=600, max_num_seqs=16
    )
    loaded = load_model(config)
    with load(milestone).LLMEngine(config, loaded) as engine:
        pool = engine.core.runner.kv_pool
        page_mb = sum(tensor[:, 0].nbytes for tensor in (*pool.keys, *pool.values)) / 1e6
        for size in map(int, sizes):
            [stem] = prompts_of([size], seed=1)
            engine.reset_prefix_cache()
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            for own in prompts_of([16] * 16, seed=2):
                engine.add_request(stem + own, params)
            while len(rows := engine.core.scheduler.running) < 16 or any(
                request.num_output_tokens == 0 for request in rows
            ):
                engine.step()
            read = [page for r in rows for page in engine.core.scheduler.kv_cache.pages_of(r)]
            once = len(set(read))
            yield (
                f"{size}", f"{page_mb * len(read):.1f}", f"{page_mb * once:.1f}",
                f"{once / len(read):.2f}",
            )  # fmt: skip
            while engine.has_unfinished_requests():
                engine.step()


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
