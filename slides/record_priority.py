"""Record how an urgent request preempts another, and how long urgent requests wait. Counters only.

No file here has a time, so another run is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from milestones.chain import load
from milestones.course.student.measure_counters import by_urgency

Json = dict[str, Any]
TINY = "tiny-llama"
URGENT_ARRIVES = 3  # before this step
PROMPTS = {"low": ([1] * 12, 8), "urgent": ([2] * 18, 3)}  # and the numbers of output tokens


def makes_way(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return each step of two requests with 12 pages: computed tokens, and pages that are copied.

    A copy is taken to be faster than computing its tokens.
    """
    config = EngineConfig(
        model=TINY, device="cpu", max_num_seqs=4, max_model_len=64, page_size=2, num_pages=12,
        enable_overlap=False,
    )  # fmt: skip
    steps: list[Json] = []
    with load("priority").LLMEngine(config, loaded or load_model(config)) as engine:
        engine.core.costs.page_seconds = 0.0
        cache, launch = engine.core.scheduler.kv_cache.radix_cache, engine.core.runner.launch

        def noted(batch: Any, table: Any) -> Any:
            names = [request.request_id for request in batch.requests]
            steps[-1]["tokens"] = dict(zip(names, batch.num_scheduled_tokens, strict=True))
            return launch(batch, table)

        engine.core.runner.launch = noted
        add(engine, "low", priority=1)
        while engine.has_unfinished_requests():
            if len(steps) + 1 == URGENT_ARRIVES:
                add(engine, "urgent", priority=0)
            before = (cache.num_written, cache.num_loaded)
            steps.append({"tokens": {}})
            engine.step()
            engine.check_invariants()
            steps[-1]["to_host"] = cache.num_written - before[0]
            steps[-1]["from_host"] = cache.num_loaded - before[1]
        preempted = engine.core.scheduler.preemption.num_preemptions
    return {"num_pages": 12, "page_size": 2, "preempted": preempted, "steps": steps}


def add(engine: Any, name: str, priority: int) -> None:
    """Add one of the two requests."""
    prompt, max_tokens = PROMPTS[name]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.add_request(prompt, params, name, priority=priority)


def waits(_name: str) -> Json:
    """Return the table of `measure priority`: a row for each load and engine."""
    keys = (
        "load", "engine", "urgent_p50", "urgent_p95", "others_p50", "steps", "computed", "cached",
        "preempted", "loaded",
    )  # fmt: skip
    rows = [dict(zip(keys, row, strict=True)) for row in by_urgency("priority", TINY, (0.0, 2.0))]
    for row in rows:
        for key in keys[2:]:
            row[key] = float(row[key]) if row[key] else None  # type: ignore[assignment]
        row["engine"] = row["engine"].replace("host x ", "host_")
    return {"rows": rows}


PRIORITY: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "priority_example": (("priority",), makes_way),
    "priority_waits": (("m5_overlap", "priority"), waits),
}
