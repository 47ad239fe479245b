"""Record what the central pictures of the decks show: states of engines, and scores of attention.

No file here has a time. Another run gives the same files, and
`tests/slides/test_slides.py` compares them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.displays.workload import Workload

from .workloads import PROMPTS, config_of, params_of

Json = dict[str, Any]
TINY = "tiny-llama"

# KV memory for 1,280 tokens: as four rows of m2, and as pages of m3.
ROWS: Json = {"max_num_seqs": 4, "max_model_len": 320}
PAGED: Json = {"max_model_len": 320, "max_num_seqs": 32, "page_size": 4, "num_pages": 320}

# The scores of one query head at the last token of a text. A kernel reads them in tiles.
SCORES: Json = {"text": PROMPTS["C"], "layer": 16, "head": 2, "tile": 4}

# Two prompts with the same beginning. The second one parts from the first inside of a node.
SPLIT: Json = {"max_num_seqs": 2, "max_model_len": 32, "page_size": 2, "num_pages": 20}
SPLIT_PROMPTS = {"C": PROMPTS["C"], "D": "The capital of France has not always been Paris"}

FORWARDS = (6, 7)  # of the worked example of m5: the forwards that the picture shows


def engine_of(milestone: str, loaded: LoadedModel, **config: Any) -> Any:
    """Return an engine of a milestone."""
    return importlib.import_module(milestone).LLMEngine(EngineConfig(**config), loaded)


def same_memory(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the owners of the same memory on m2 and m3, in the step in which m3 runs the most."""
    loaded = loaded or load_model(EngineConfig(model=TINY))
    pages = _states("m3_paged", loaded, mixed_lengths(), PAGED)
    rows = _states("m2_continuous", loaded, mixed_lengths(), ROWS)
    step = max(range(len(pages)), key=lambda n: (len(pages[n]), n))
    return {
        "step": step + 1,
        "rows": ROWS,
        "pages": PAGED,
        "m2_continuous": rows[step],
        "m3_paged": pages[step],
    }


def mixed_lengths() -> Workload:
    """Return 24 requests of mixed length."""
    prompts = [[1 + (i * 7 + j) % 250 for j in range(20 + 9 * (i % 7))] for i in range(24)]
    return Workload(prompts, [12 + 11 * (i % 5) for i in range(24)], ignore_eos=True)


def _states(
    milestone: str, loaded: LoadedModel, workload: Workload, config: Json
) -> list[dict[str, Json]]:
    """Return the running requests after each step: tokens written, and the row or the pages."""
    states = []
    with engine_of(milestone, loaded, model=TINY, **config) as engine:
        for number, prompt in enumerate(workload.prompts):
            params = SamplingParams(
                max_tokens=workload.max_tokens[number], temperature=0, ignore_eos=True
            )
            engine.add_request(prompt, params, str(number))
        while engine.has_unfinished_requests():
            engine.step()
            manager = engine.core.scheduler.kv_cache
            states.append(
                {
                    request.request_id: {
                        "computed": request.num_computed_tokens,
                        "row": request.row,
                        "pages": list(manager.pages_of(request)) if milestone > "m3" else [],
                    }
                    for request in engine.core.scheduler.running
                }
            )
    return states


def scores(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the attention scores of one query head at the last token of a text."""
    model = (loaded or load_model(EngineConfig(), plain=True)).model
    tokenizer = (loaded or load_model(EngineConfig())).tokenizer
    token_ids = tokenizer(SCORES["text"])["input_ids"]
    found = _scores_of(model, token_ids, SCORES["layer"])[SCORES["head"]]
    return {
        **SCORES,
        "tokens": [tokenizer.decode([token]) for token in token_ids],
        "scores": [round(score, 2) for score in found[-1].tolist()],
    }


def _scores_of(model: PreTrainedModel, token_ids: list[int], layer: int) -> torch.Tensor:
    """Return the scores [query heads, T, T] of a layer, before the mask and the softmax."""
    caught: list[torch.Tensor] = []

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        if module.layer_idx == layer:
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            caught.append(more["scaling"] * query[0] @ keys[0].transpose(1, 2))
        return sdpa_attention_forward(module, query, key, value, mask, **more)

    AttentionInterface.register("slides_scores", attention)
    before = model.config._attn_implementation
    model.set_attn_implementation("slides_scores")
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([token_ids]), use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return caught[0]


def split(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the radix tree before and after each operation of a request that splits a node."""
    loaded = loaded or load_model(EngineConfig())
    frames: list[Json] = []
    with engine_of("m4_radix", loaded, **SPLIT) as engine:
        numbers: dict[int, int] = {}
        cache = engine.core.scheduler.kv_cache.radix_cache
        params = SamplingParams(max_tokens=5, temperature=0)
        (first, prompt), (second, longer) = SPLIT_PROMPTS.items()
        engine.add_request(prompt, params, first)
        engine.step()
        frames.append({"after": "", "nodes": _nodes(cache, numbers, loaded)})
        for name in WATCHED:
            _watch(cache, name, lambda name: frames.append(
                {"after": name, "nodes": _nodes(cache, numbers, loaded)}
            ))  # fmt: skip
        engine.add_request(longer, params, second)
        engine.step()
        frames.append({"after": "step", "nodes": _nodes(cache, numbers, loaded)})
        tables = {
            request.request_id: list(engine.core.scheduler.kv_cache.pages_of(request))
            for request in engine.core.scheduler.running
        }
    words = {
        name: [loaded.tokenizer.decode([t]) for t in loaded.tokenizer(prompt)["input_ids"]]
        for name, prompt in SPLIT_PROMPTS.items()
    }
    kept = [next(f for f in frames if f["after"] == name) for name in ("", *WATCHED, "step")]
    return {"config": SPLIT, "prompts": words, "frames": kept, "tables": tables}


WATCHED = ("match_prefix", "lock")


def _watch(cache: Any, name: str, say: Callable[[str], None]) -> None:
    """Call `say` after each call of a method of the cache."""
    original = getattr(cache, name)

    def watched(*args: Any) -> Any:
        result = original(*args)
        say(name)
        return result

    setattr(cache, name, watched)


def _nodes(cache: Any, numbers: dict[int, int], loaded: LoadedModel) -> dict[str, Json]:
    """Return the nodes of a tree. A node has the number under which it was seen first."""
    size, found, open_nodes = cache.page_size, dict[str, Json](), [(0, cache.root)]
    while open_nodes:
        parent, node = open_nodes.pop(0)
        for child in node.children.values():
            number = numbers.setdefault(id(child), len(numbers) + 1)
            words = [
                loaded.tokenizer.decode(child.tokens[i * size : (i + 1) * size])
                for i in range(len(child.pages))
            ]
            found[str(number)] = {
                "parent": parent, "pages": list(child.pages), "words": words,
                "locks": child.lock_count,
            }  # fmt: skip
            open_nodes.append((number, child))
    return found


def futures(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the inputs of some forwards of the worked example, before and after `resolve`."""
    loaded = loaded or load_model(EngineConfig())
    milestone, config = config_of("m5_example")
    resolved: list[Json] = []
    with engine_of(milestone, loaded, **config) as engine:
        future_map = engine.core.runner.future_map
        resolve, store = future_map.resolve, future_map.store

        def watched_resolve(input_ids: torch.Tensor) -> torch.Tensor:
            result = resolve(input_ids)
            resolved.append({"before": input_ids.flatten().tolist(),
                             "after": result.flatten().tolist()})  # fmt: skip
            return result

        def watched_store(indices: torch.Tensor, token_ids: torch.Tensor) -> None:
            store(indices, token_ids)
            resolved[-1]["stored"] = dict(
                zip(map(str, indices.tolist()), token_ids.flatten().tolist(), strict=True)
            )

        future_map.resolve, future_map.store = watched_resolve, watched_store
        for request_id, params in params_of("m5_example").items():
            engine.add_request(PROMPTS[request_id], params, request_id)
        while engine.has_unfinished_requests():
            engine.step()
    first, last = FORWARDS
    shown = [{"forward": n, **resolved[n - 1]} for n in range(first, last + 1)]
    used = {t for f in shown for t in (*f["before"], *f["after"], *f["stored"].values()) if t >= 0}
    return {
        "forwards": shown,
        "words": {str(t): loaded.tokenizer.decode([t]) for t in sorted(used)},
    }


IDEAS: dict[str, tuple[tuple[str, ...], Callable[[str], Json]]] = {
    "m3_map": (("m2_continuous", "m3_paged"), same_memory),
    "m3_scores": ((), scores),
    "m4_split": (("m4_radix",), split),
    "m5_futures": (("m5_overlap",), futures),
}
