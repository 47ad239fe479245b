"""The measurement of hybrid_memory: the pages of one request, by the length of its context."""

from __future__ import annotations

from collections.abc import Iterator

from common import EngineConfig, SamplingParams, load_model

from ...chain import load
from .measuring import Row, prompts_of

WINDOWED = "tiny-gemma3_text"  # random weights: the pages are counted, and the text means nothing
CHUNK, PAGE, OUTPUT = 32, 8, 9  # tokens


def by_context(milestone: str, model: str, sizes: tuple[float, ...]) -> Iterator[Row]:
    """hybrid_memory: the pages of a request with a prompt of so many tokens, after its steps.

    They are counted in all groups together. Full attention would hold its pages in each group.
    """
    longest = int(max(sizes)) + OUTPUT + 1
    config = EngineConfig(
        model=model, device="cpu", max_model_len=longest, page_size=PAGE,
        num_pages=4 * longest // PAGE, max_num_batched_tokens=CHUNK, enable_overlap=False,
    )  # fmt: skip
    loaded = load_model(config)
    for size in map(int, sizes):
        with load(milestone).LLMEngine(config, loaded) as engine:
            groups, kv_cache = engine.core.runner.kv_pool.groups, engine.core.scheduler.kv_cache
            params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
            engine.add_request(prompts_of([size])[0], params)
            held = [0]
            while engine.has_unfinished_requests():
                engine.step()
                for request in engine.core.scheduler.running:
                    full = len(kv_cache.pages_of(request)) * len(groups)
                    held.append(kv_cache.num_pages_of(request))
        yield f"{size}", f"{full}", f"{max(held)}", f"{held[-1]}", f"{held[-1] / full:.2f}"
