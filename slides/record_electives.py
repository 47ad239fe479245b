"""Record what the deck of the electives shows. No file here has a time, so another run is equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.displays.workload import Workload, run
from milestones.chain import load

Json = dict[str, Any]
TINY = "tiny-llama"
PLANS = (1, 2, 4, 8)  # steps of a plan
ENDS = range(0, 256, 24)  # tokens that end a request: about one in 24, and no plan can know it

# A text that repeats itself, and then does not: drafts of both kinds.
DRAFTED = "Monday is a good day. Tuesday is a good day. Wednesday is"


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


LESSONS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "multi_step_vain": (("m5_overlap", "multi_step"), in_vain),
    "speculative_drafts": (("speculative",), drafts),
}
