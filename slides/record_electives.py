"""Record counters and an answer for the deck of the electives: plans, drafts, a grammar, and the
tables of `measure`. No run here has a time, so another run is equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from common import EngineConfig, LoadedModel, SamplingParams, StructuredOutputsParams, load_model
from common.displays.workload import Workload, run
from milestones.chain import load
from milestones.course.student.measure_electives import by_budget, by_urgency

from .record_ideas import TINY

Json = dict[str, Any]
PLANS = (1, 2, 4, 8)  # steps of a plan
ENDS = range(0, 256, 24)  # tokens that end a request: about one in 24, and no plan can know it

# A text that repeats itself, and then does not: drafts of both kinds.
DRAFTED = "Monday is a good day. Tuesday is a good day. Wednesday is"

QUESTION = "Name a fruit and describe it."
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "sweet": {"type": "boolean"}},
    "required": ["color", "sweet"],
    "additionalProperties": False,
}


def in_vain(_name: str) -> Json:
    """Serve 32 requests at once on m5 and on plans of that many steps. Return their counters."""
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, 250) for _ in range(8)] for _ in range(32)]
    workload = Workload(prompts, [48] * len(prompts))
    made = {"m5_overlap": _counted("m5_overlap", workload, None)}
    made |= {f"plans_of_{size}": _counted("multi_step", workload, size) for size in PLANS}
    return {"num_requests": len(prompts), "runs": made}


def _counted(milestone: str, workload: Workload, num_steps: int | None) -> Json:
    config = EngineConfig(model=TINY, device="cpu", max_num_seqs=16, max_model_len=96)
    with load(milestone).LLMEngine(config, load_model(config)) as engine:
        if num_steps is not None:
            engine.core.scheduler.num_steps = num_steps
        engine.input_processor.eos_token_ids |= frozenset(ENDS)
        tokens = sum(map(len, run(engine, workload).token_ids))
        stats = engine.stats()
    return {"tokens": tokens, "in_vain": stats.padding_tokens, "steps": stats.num_steps}


def drafts(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return the drafts of each step of one request, and the model's own tokens."""
    loaded = loaded or load_model(EngineConfig())
    steps: list[Json] = []

    def words(tokens: list[int]) -> list[str]:
        return [loaded.tokenizer.decode([token]) for token in tokens]  # type: ignore[misc]

    with load("speculative").LLMEngine(EngineConfig(max_num_seqs=2), loaded) as engine:
        scheduler = engine.core.scheduler
        update = scheduler.update_from_output

        def watched(batch: Any, sampled: Any) -> Any:
            [request] = batch.requests
            *known, _placeholder = request.token_ids
            outputs = update(batch, sampled)
            steps.append({"newest": words(known[-1:])[0], "drafts": words(batch.drafts_of(request)),
                          "own": words([token for token, _ in sampled]),
                          "appended": len(request.token_ids) - len(known)})  # fmt: skip
            return outputs

        scheduler.update_from_output = watched
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        [output] = engine.generate([DRAFTED], params)
        stats = engine.stats()
    return {
        "prompt": DRAFTED, "text": output.outputs[0].text, "steps": steps,
        "drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens,
        "num_steps": stats.num_steps, "tokens": len(output.outputs[0].token_ids),
    }  # fmt: skip


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


def gaps(_name: str) -> Json:
    """Return the table of `measure embedding`: a row for each budget, with vectors and without."""
    keys = (
        "budget", "vectors", "gap_steps", "gap_tokens_p50", "gap_tokens_max", "vector_steps",
        "steps",
    )  # fmt: skip
    rows = by_budget("embedding", TINY, (16.0, 64.0, 256.0))
    found = [dict(zip(keys, map(_number, row), strict=True)) for row in rows]
    return {"rows": found}


def _number(cell: str) -> int | None:
    return int(float(cell)) if cell else None


LESSONS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "multi_step_vain": (("m5_overlap", "multi_step"), in_vain),
    "speculative_drafts": (("speculative",), drafts),
    "priority_waits": (("m5_overlap", "priority"), waits),
    "embedding_gaps": (("embedding",), gaps),
}
# These need the extra `grammar`.
GRAMMARS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "structured_answer": (("structured_output",), answer),
}
