"""Record an answer under a grammar, and the lanes of its loops. Both need the extra `grammar`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from common import EngineConfig, LoadedModel, SamplingParams, StructuredOutputsParams, load_model
from common.displays.demo import machine
from milestones.chain import load

from .record_lanes import lanes_of

Json = dict[str, Any]
FORWARD_MS, NUM_REQUESTS, NUM_ROUNDS = 10.0, 8, 8
QUESTION = "Name a fruit and describe it."
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "sweet": {"type": "boolean"}},
    "required": ["color", "sweet"],
    "additionalProperties": False,
}
LOOPS = {"plain": 0, "delayed": 1, "waiting": 2}  # names on slides, and places in `gaps.LOOPS`


def answer(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the tokens of an answer under a grammar: how many were allowed, the drawn one, and the
    token that the model itself prefers. Beside it, the answer without the grammar."""
    loaded = loaded or load_model(EngineConfig())
    shape: Json = {"max_tokens": 24, "temperature": 0}
    grammar = StructuredOutputsParams(json=json.dumps(SCHEMA))
    allowed: list[int] = []
    with load("structured_output").LLMEngine(EngineConfig(max_num_seqs=2), loaded) as engine:
        talk = [{"role": "user", "content": QUESTION}]
        prompt = engine.input_processor.apply_chat_template(talk)
        masks = engine.core.scheduler.grammars.masks

        def watched(requests: Any) -> Any:
            rows, bits = masks(requests)
            allowed.extend(int(np.unpackbits(row.view(np.uint8)).sum()) for row in bits)
            return rows, bits

        engine.core.scheduler.grammars.masks = watched
        under = SamplingParams(**shape, logprobs=1, structured_outputs=grammar)
        [masked] = engine.generate([prompt], under, progress=False)
        [free] = engine.generate([prompt], SamplingParams(**shape), progress=False)
    done = masked.outputs[0]
    own = [max(found, key=lambda token: found[token]) for found in done.logprobs]
    steps = [
        {"token": loaded.tokenizer.decode([token]), "own": loaded.tokenizer.decode([mine]),
         "allowed": count}
        for token, mine, count in zip(done.token_ids, own, allowed, strict=True)
    ]  # fmt: skip
    return {
        "question": QUESTION, "vocabulary": loaded.vocab_size, "steps": steps, "text": done.text,
        "finish_reason": done.finish_reason, "free": free.outputs[0].text,
    }  # fmt: skip


def grammar_lanes(_name: str) -> Json:
    """Record the lanes of eight requests in three loops. The forwards sleep for 10 ms.

    Of several rounds, the fastest is kept: other work of the machine disturbed it least.
    """
    loaded = load_model(EngineConfig(device="cpu"))
    gaps = load("structured_output", "demo.gaps")
    made: Json = {"machine": machine(), "emulated_forward_ms": FORWARD_MS}
    for name, place in LOOPS.items():
        loop = gaps.LOOPS[place]
        rounds = [
            lanes_of(gaps.traced(loaded, loop, NUM_REQUESTS, FORWARD_MS), count=4)
            for _ in range(NUM_ROUNDS)
        ]
        made[name] = min(rounds, key=lambda found: float(found["forward"][-1]["end"]))
        for number, forward in enumerate(made[name]["forward"], 1):
            forward["step"] = number
    return made


GRAMMARS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "structured_answer": (("structured_output",), answer),
}
