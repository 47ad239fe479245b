"""Runs the whole engine of a milestone on a few requests, for `break`: right answers beside wrong.

The command runs this file with pytest, in a process of its own. The result is in
`.ladder/texts.json` of the tree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common import EngineConfig, SamplingParams

from ...chain import at_least, engines, load
from ...lab.instruments.streams import EarlyStream, LateStream
from .progress import TEXTS
from .texts_electives import add_request, answer_of, arrives, prepare

ROOT = Path(__file__).resolve().parents[3]
STREAMS = {"a thread": None, "early": EarlyStream, "late": LateStream}
PROMPTS = (
    [5, 6, 7, 8, 9, 10], [9] * 14, [5, 6, 7, 8, 9, 11, 12], [3], list(range(60, 85)),
    [5, 6, 7, 8, 30], [41, 42, 43],
)  # fmt: skip
STOPS = [token for token in range(256) if token % 5 == 0]  # every second request ends with one
MOST_STEPS = 400
SHOWN = ("num_steps", "num_retractions", "padding_tokens", "cached_prompt_tokens")


@pytest.mark.parametrize("milestone", engines(ROOT))
def test_texts(milestone: str) -> None:
    """Write what the engine of a milestone answers, for each of its streams."""
    path = ROOT / TEXTS
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(answers_of(milestone)), encoding="utf-8")


def answers_of(milestone: str) -> dict[str, Any]:
    """Return the results by stream. An engine without a forward stream has one result."""
    package = load(milestone)
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=3, page_size=4, num_pages=14,
        max_num_batched_tokens=12 if at_least(milestone, "m3_paged") else 64, max_model_len=48,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name, stream in STREAMS.items():
        engine = package.LLMEngine(config)
        prepare(engine)
        if hasattr(engine.core.runner, "stream"):
            engine.core.runner.stream = stream() if stream else engine.core.runner.stream
            engine.core.runner.graphs.sizes = [1, 2, 4]  # as on a GPU: a batch of 3 is padded
            found[f"on {name}" if stream is None else f"on the {name} stream"] = result_of(engine)
        else:
            return {"": result_of(engine)}
    return found


def params_of(number: int) -> SamplingParams:
    """Return the parameters of a request. Those with even numbers have stop tokens."""
    return SamplingParams(
        max_tokens=20 - 3 * (number % 3), temperature=0, ignore_eos=True,
        stop_token_ids=[] if number % 2 else STOPS,
    )  # fmt: skip


def result_of(engine: Any) -> dict[str, Any]:
    """Return the tokens of each request, some counters, and the error that ended the run."""
    answers: dict[str, list[int]] = {}
    error = None
    try:
        for step in range(MOST_STEPS):
            for number, prompt in enumerate(PROMPTS, start=1):
                if arrives(engine, str(number)) == step:
                    add_request(engine, list(prompt), params_of(number), str(number))
            for output in engine.step():
                answers[output.request_id] = answer_of(output)
            if not engine.has_unfinished_requests():
                break
        else:
            error = f"the requests have not ended after {MOST_STEPS} steps"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    stats = engine.stats()
    counters = {name: getattr(stats, name) for name in SHOWN}
    return {"answers": answers, "counters": counters, "error": error}
