"""Record a text beside two vectors, and what vectors cost the texts beside them. Counters only.

No file here has a time, so another run is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import EngineConfig, LoadedModel, PoolingParams, SamplingParams, load_model
from milestones.chain import load
from milestones.course.student.measure_counters import by_budget

Json = dict[str, Any]
TINY = "tiny-llama"
PROMPT = [*range(14)]
ARRIVALS = {2: PoolingParams("MEAN"), 5: PoolingParams("LAST")}  # before these steps
BUDGETS = (16.0, 64.0, 256.0)


def steps_of_three(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return each step of a text and two vectors: computed tokens, and those that are pooled."""
    config = EngineConfig(
        model=TINY, device="cpu", max_num_seqs=4, max_model_len=64, page_size=4, num_pages=20,
        max_num_batched_tokens=8, enable_overlap=False,
    )  # fmt: skip
    steps: list[Json] = []
    with load("embedding").LLMEngine(config, loaded or load_model(config)) as engine:
        launch = engine.core.runner.launch

        def noted(batch: Any, table: Any) -> Any:
            names = [request.request_id for request in batch.requests]
            steps[-1]["tokens"] = dict(zip(names, batch.num_scheduled_tokens, strict=True))
            steps[-1]["pooled"] = [names[i] for i in batch.pooled_indices]
            return launch(batch, table)

        engine.core.runner.launch = noted
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        engine.add_request([40, 41, 42], params, "text")
        while engine.has_unfinished_requests():
            if arrival := ARRIVALS.get(len(steps) + 1):
                engine.add_request(PROMPT, arrival, arrival.pooling_type)
            steps.append({"tokens": {}, "pooled": []})
            finals = [output.request_id for output in engine.step() if output.finished]
            engine.check_invariants()
            steps[-1]["ended"] = finals
        cached = engine.stats().cached_prompt_tokens
    return {"page_size": 4, "budget": 8, "cached": cached, "steps": steps}


def gaps(_name: str) -> Json:
    """Return the table of `measure embedding`: a row for each budget, with vectors and without."""
    keys = (
        "budget", "vectors", "gap_steps", "gap_tokens_p50", "gap_tokens_max", "vector_steps",
        "steps",
    )  # fmt: skip
    rows = by_budget("embedding", TINY, BUDGETS)
    found = [dict(zip(keys, map(_number, row), strict=True)) for row in rows]
    return {"rows": found}


def _number(cell: str) -> int | None:
    return int(float(cell)) if cell else None


EMBEDDING: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "embedding_example": (("embedding",), steps_of_three),
    "embedding_gaps": (("embedding",), gaps),
}
