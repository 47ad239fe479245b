"""Run one scene on an engine: `record_mistakes.py` gives this text to a Python of its own.

It reads a scene from standard input, and prints the answer to the last prompt, and its pages. The
current folder is a tree, perhaps one with a mistake in it. So only the tree is imported here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common import EngineConfig, SamplingParams
from milestones.chain import load

LAST = "last"


def main() -> None:
    """Answer the prompts one after the other, and print what happened to the last one."""
    scene = json.load(sys.stdin)
    engine = load(scene["engine"]).LLMEngine(EngineConfig(**scene["config"]))
    params = SamplingParams(max_tokens=scene["max_tokens"], temperature=0)
    *before, prompt = scene["prompts"]
    for earlier in before:
        engine.generate([earlier], params)
    if scene.get("reset"):
        engine.reset_prefix_cache()
    engine.add_request(prompt, params, LAST)
    texts, pages = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts.append(output.outputs[0].text)
        pages.append(pages_of(engine))
    words = [engine.loaded.tokenizer.decode([t]) for t in engine.loaded.tokenizer(prompt).input_ids]
    made = {
        "text": " ".join(texts[-1].split()), "first": texts[0].strip(), "pages": pages,
        "prompt": words,
    }  # fmt: skip
    sys.stdout.write(json.dumps(made))


def pages_of(engine: Any) -> list[int]:
    """Return the pages in the row of the last request, in order of position."""
    running = [r for r in engine.scheduler.running if r.request_id == LAST]
    return [int(page) for r in running for page in engine.scheduler.kv_cache.pages_of(r)]


if __name__ == "__main__":
    main()
