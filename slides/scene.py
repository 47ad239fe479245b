"""Run scenes on engines: `record_mistakes.py` gives this text to a Python of its own.

It reads scenes from standard input. For each, it prints the answer to the last prompt, and its
pages. The current folder is a tree, perhaps one with a mistake in it. So only the tree is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from milestones.chain import load

LAST = "last"


def main() -> None:
    """Play each scene, and print what happened."""
    loaded = load_model(EngineConfig())
    scenes = json.load(sys.stdin)
    made = {name: played(scene, loaded) for name, scene in scenes.items()}
    sys.stdout.write(json.dumps(made))


def played(scene: dict[str, Any], loaded: LoadedModel) -> dict[str, Any]:
    """Answer the prompts one after the other. Return what happened to the last one."""
    engine = load(scene["engine"]).LLMEngine(EngineConfig(**scene["config"]), loaded)
    params = SamplingParams(max_tokens=scene["max_tokens"], temperature=0)
    *before, prompt = scene["prompts"]
    for earlier in before:
        engine.generate([earlier], params)
    tree = nodes_of(engine)
    if scene.get("reset"):
        engine.reset_prefix_cache()
    engine.add_request(prompt, params, LAST)
    texts, pages = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts.append(output.outputs[0].text)
        pages.append(pages_of(engine))
    words = [engine.loaded.tokenizer.decode([t]) for t in engine.loaded.tokenizer(prompt).input_ids]
    engine.close()
    return {
        "text": " ".join(texts[-1].split()), "first": texts[0].strip(), "pages": pages,
        "prompt": words, "tree": tree,
    }  # fmt: skip


def nodes_of(engine: Any) -> list[list[int]]:
    """Return the pages of each node of the radix tree, parents first."""
    radix_cache = getattr(engine.core.scheduler.kv_cache, "radix_cache", None)
    return [list(node.pages) for node in radix_cache.nodes()] if radix_cache else []


def pages_of(engine: Any) -> list[int]:
    """Return the pages in the row of the last request, in order of position."""
    running = [r for r in engine.core.scheduler.running if r.request_id == LAST]
    return [int(page) for r in running for page in engine.core.scheduler.kv_cache.pages_of(r)]


if __name__ == "__main__":
    main()
