"""Record the pages of a long request in each group, and what prompts find in a tree with states.

Counters only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from milestones.chain import load

Json = dict[str, Any]
TINY = "tiny-gemma3_text"
WITH_STATES = "tiny-qwen3_next"
STEM, TAIL = 45, 20  # tokens that prompts share, and that they do not
PROMPT, CHUNK = 160, 32  # tokens


def pages(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return for each step of a long request the pages of its groups, after the step.

    `everywhere` is what full attention in all layers would hold.
    """
    config = EngineConfig(
        model=TINY, device="cpu", max_model_len=256, page_size=8, num_pages=128,
        max_num_batched_tokens=CHUNK, enable_overlap=False,
    )  # fmt: skip
    steps: list[Json] = []
    with load("hybrid_memory").LLMEngine(config, loaded or load_model(config)) as engine:
        groups, kv_cache = engine.core.runner.kv_pool.groups, engine.core.scheduler.kv_cache
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        engine.add_request([5 + number % 250 for number in range(PROMPT)], params)
        while engine.has_unfinished_requests():
            engine.step()
            for request in engine.core.scheduler.running:
                full = len(kv_cache.pages_of(request))
                steps.append(
                    {"tokens": request.num_computed_tokens, "full": full,
                     "windows": kv_cache.num_pages_of(request) - full,
                     "everywhere": full * len(groups)}
                )  # fmt: skip
    return {
        "groups": len(groups), "window": groups[1].window, "page_size": config.page_size,
        "steps": steps, "first": steps[0], "last": steps[-1],
    }  # fmt: skip


def states(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the computed tokens of prompts with one stem. The last prompt is the third again."""
    config = EngineConfig(
        model=WITH_STATES, device="cpu", max_model_len=256, page_size=8, num_pages=128,
        max_num_batched_tokens=128, enable_overlap=False,
    )  # fmt: skip
    stem = [5 + number % 250 for number in range(STEM)]
    prompts = {name: [*stem, *[number] * TAIL] for name, number in zip(
        ("first", "second", "third", "again"), (7, 8, 9, 9), strict=True
    )}  # fmt: skip
    found: dict[str, int] = {}
    with load("hybrid_memory").LLMEngine(config, loaded or load_model(config)) as engine:
        for name, prompt in prompts.items():
            before = engine.stats().prefill_tokens
            engine.generate([prompt], SamplingParams(max_tokens=1), progress=False)
            found[name] = engine.stats().prefill_tokens - before
    return {"page_size": config.page_size, "stem": STEM, "prompt": STEM + TAIL, "computed": found}


HYBRID: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "hybrid_pages": (("hybrid_memory",), pages),
    "hybrid_states": (("hybrid_memory",), states),
}
