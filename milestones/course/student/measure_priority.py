"""The measurement of priority: urgent requests under load, and pages that go to the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from common import EngineConfig, SamplingParams, load_model
from common.displays.workload import percentile

from ...chain import below, load, short
from .measuring import Row, prompts_of


def by_urgency(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """priority: urgent requests under load, and conversations that the pool cannot hold.

    Times are in steps, so they do not depend on the machine. sizes: host pages for each page of the
    pool. A copy is taken to be faster than computing its tokens.
    """
    lower = below(milestone)
    assert lower is not None, "an elective lies on a milestone"
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    config = EngineConfig(
        model=model, device="cpu", max_num_seqs=4, max_model_len=128, page_size=4, num_pages=96
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
                    num_host_pages = int(size * config_pages(config))
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


def config_pages(config: EngineConfig) -> int:
    """Return the pages of the pool, which the measurement has given."""
    assert config.num_pages is not None
    return config.num_pages


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
