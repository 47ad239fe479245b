"""Record what each step of a small run does on the electives: tokens, pages, vectors and adapters.

No run here has a time, so another run is equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import (
    EngineConfig,
    LoadedModel,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    load_model,
)  # fmt: skip
from milestones.chain import load
from milestones.lab.instruments.random_adapter import write_adapter

from .record_ideas import TINY

Json = dict[str, Any]
POOLED_PROMPT = [*range(14)]
ARRIVALS = {2: PoolingParams("MEAN"), 5: PoolingParams("LAST")}  # before these steps

URGENT_ARRIVES = 3  # before this step
PROMPTS = {"low": ([1] * 12, 8), "urgent": ([2] * 18, 3)}  # and the numbers of output tokens

# Before which step a request arrives, its adapter, and its output tokens.
REQUESTS = {
    "r1": (1, "A", 8), "r2": (1, "B", 3), "r3": (2, "C", 4), "r4": (3, None, 4), "r5": (3, "A", 4),
}  # fmt: skip

WITH_WINDOWS, WITH_STATES = "tiny-gemma3_text", "tiny-qwen3_next"
PROMPT, CHUNK = 160, 32  # tokens
STEM, TAIL = 45, 20  # tokens that prompts share, and that they do not


@contextmanager
def serial_engine(name: str, loaded: LoadedModel | None, **config: Any) -> Iterator[Any]:
    """Open an engine on the CPU that runs one step after the other."""
    whole: Json = {"model": TINY, "device": "cpu", "max_model_len": 64, **config}
    options = EngineConfig(**whole, enable_overlap=False)
    with load(name).LLMEngine(options, loaded or load_model(options)) as engine:
        yield engine


def note_batches(engine: Any, note: Callable[[Any, list[str]], None]) -> None:
    """Call `note` with each batch that is launched from now on, and the names of its requests."""
    launch = engine.core.runner.launch

    def noted(batch: Any, table: Any) -> Any:
        note(batch, [request.request_id for request in batch.requests])
        return launch(batch, table)

    engine.core.runner.launch = noted


def forever(max_tokens: int) -> SamplingParams:
    """Return parameters for exactly `max_tokens` tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def pooled(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return each step of a text and two vectors: computed tokens, and those that are pooled."""
    config: Json = {"max_num_seqs": 4, "page_size": 4, "num_pages": 20}
    steps: list[Json] = []

    def note(batch: Any, names: list[str]) -> None:
        steps[-1]["tokens"] = dict(zip(names, batch.num_scheduled_tokens, strict=True))
        steps[-1]["pooled"] = [names[i] for i in batch.pooled_indices]

    with serial_engine("embedding", loaded, max_num_batched_tokens=8, **config) as engine:
        note_batches(engine, note)
        engine.add_request([40, 41, 42], forever(6), "text")
        while engine.has_unfinished_requests():
            if arrival := ARRIVALS.get(len(steps) + 1):
                engine.add_request(POOLED_PROMPT, arrival, arrival.pooling_type)
            steps.append({"tokens": {}, "pooled": []})
            finals = [output.request_id for output in engine.step() if output.finished]
            engine.check_invariants()
            steps[-1]["ended"] = finals
        cached = engine.stats().cached_prompt_tokens
    return {"page_size": 4, "budget": 8, "cached": cached, "steps": steps}


def makes_way(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return each step of two requests with 12 pages: computed tokens, and pages that are copied.

    A copy is taken to be faster than computing its tokens.
    """
    config: Json = {"max_num_seqs": 4, "page_size": 2, "num_pages": 12}
    steps: list[Json] = []

    def note(batch: Any, names: list[str]) -> None:
        steps[-1]["tokens"] = dict(zip(names, batch.num_scheduled_tokens, strict=True))

    with serial_engine("priority", loaded, **config) as engine:
        engine.core.costs.page_seconds = 0.0
        cache = engine.core.scheduler.kv_cache.radix_cache

        def add(name: str, priority: int) -> None:
            prompt, max_tokens = PROMPTS[name]
            engine.add_request(prompt, forever(max_tokens), name, priority=priority)

        note_batches(engine, note)
        add("low", priority=1)
        while engine.has_unfinished_requests():
            if len(steps) + 1 == URGENT_ARRIVES:
                add("urgent", priority=0)
            before = (cache.num_written, cache.num_loaded)
            steps.append({"tokens": {}})
            engine.step()
            engine.check_invariants()
            steps[-1]["to_host"] = cache.num_written - before[0]
            steps[-1]["from_host"] = cache.num_loaded - before[1]
        preempted = engine.core.scheduler.preemption.num_preemptions
    return {"num_pages": 12, "page_size": 2, "preempted": preempted, "steps": steps}


def shared_batch(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return each step of five requests with two slots: the slot of each request, and the loads."""
    config: Json = {"max_num_seqs": 8, "page_size": 4, "num_pages": 64, "max_loras": 2}
    steps: list[Json] = []

    def note(batch: Any, names: list[str]) -> None:
        steps[-1]["slots"] = dict(zip(names, batch.slots, strict=True))
        steps[-1]["loads"] = [f"{load.adapter.name} to {load.slot}" for load in batch.loads]

    with tempfile.TemporaryDirectory() as folder, serial_engine("lora", loaded, **config) as engine:
        adapters: dict[str | None, LoRARequest | None] = {None: None}
        for seed, name in enumerate("ABC"):
            path = write_adapter(Path(folder, name), engine.adapters.shapes, seed)
            adapters[name] = LoRARequest(name, path)
            engine.add_lora(adapters[name])
        note_batches(engine, note)
        coming = dict(REQUESTS)
        while coming or engine.has_unfinished_requests():
            due = [name for name, (step, *_) in coming.items() if step <= len(steps) + 1]
            for name in due:
                _step, adapter, count = coming.pop(name)
                tokens, lora = [ord(name[1])] * 6, adapters[adapter]
                engine.add_request(tokens, forever(count), name, lora_request=lora)
            steps.append({"slots": {}, "loads": []})
            engine.step()
            engine.check_invariants()
            waiting = [request.request_id for request in engine.core.scheduler.waiting]
            steps[-1]["waiting"] = waiting
    names = {name: adapter for name, (_step, adapter, _tokens) in REQUESTS.items()}
    return {"num_slots": 2, "adapters": names, "steps": steps}


def pages(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return for each step of a long request the pages of its groups, after the step.

    `everywhere` is what full attention in all layers would hold.
    """
    config: Json = {"model": WITH_WINDOWS, "max_model_len": 256, "page_size": 8, "num_pages": 128}
    steps: list[Json] = []
    with serial_engine("hybrid_memory", loaded, max_num_batched_tokens=CHUNK, **config) as engine:
        groups, kv_cache = engine.core.runner.kv_pool.groups, engine.core.scheduler.kv_cache
        engine.add_request([5 + number % 250 for number in range(PROMPT)], forever(9))
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
        "groups": len(groups), "window": groups[1].window, "page_size": config["page_size"],
        "steps": steps, "first": steps[0], "last": steps[-1],
    }  # fmt: skip


def states(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the computed tokens of prompts with one stem. The last prompt is the third again."""
    config: Json = {"model": WITH_STATES, "max_model_len": 256, "page_size": 8, "num_pages": 128}
    stem = [5 + number % 250 for number in range(STEM)]
    prompts = {name: [*stem, *[number] * TAIL] for name, number in zip(
        ("first", "second", "third", "again"), (7, 8, 9, 9), strict=True
    )}  # fmt: skip
    found: dict[str, int] = {}
    with serial_engine("hybrid_memory", loaded, max_num_batched_tokens=128, **config) as engine:
        for name, prompt in prompts.items():
            before = engine.stats().prefill_tokens
            engine.generate([prompt], SamplingParams(max_tokens=1), progress=False)
            found[name] = engine.stats().prefill_tokens - before
    size = config["page_size"]
    return {"page_size": size, "stem": STEM, "prompt": STEM + TAIL, "computed": found}


STEPS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "embedding_example": (("embedding",), pooled),
    "priority_example": (("priority",), makes_way),
    "lora_example": (("lora",), shared_batch),
    "hybrid_pages": (("hybrid_memory",), pages),
    "hybrid_states": (("hybrid_memory",), states),
}
