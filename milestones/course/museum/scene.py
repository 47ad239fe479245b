"""Run the workload of an exhibit: `python -m milestones.course.museum.scene`, in a tree.

It reads a workload from standard input and prints what happened. The current folder is a tree,
perhaps one with an exhibit's bug in it, so only this tree is imported.

A workload has an `engine`, its `config`, `requests` (`id`, `before` which step it arrives,
`prompt`, `max_tokens`), the step before which the prefix cache is reset (`reset_before`), and after
how many steps the run is cut off (`most_steps`), because some runs never end.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from operator import itemgetter
from typing import Any

from common import EngineConfig, LLMEngine, LoadedModel, SamplingParams, load_model
from common.tracing.trace import Trace
from common.virtual_time import use_virtual_time

from ...chain import load

Json = dict[str, Any]


def main() -> None:
    """Run the workload of standard input, and print the result as JSON."""
    workload = json.load(sys.stdin)
    sys.stdout.write(json.dumps(played(workload, load_model(EngineConfig()))))


def played(workload: Json, loaded: LoadedModel) -> Json:
    """Return the trace of a run, what it answered, and the first fault that can be seen.

    trace: as `TraceData.as_json` returns it. free: the free pages after each step.
    fault: the first step after which an invariant is broken, and how. ended: the exception that
    ended the run, or None. answers: the text of each request so far.
    """
    engine = load(workload["engine"]).LLMEngine(EngineConfig(**workload["config"]), loaded)
    use_virtual_time(engine)
    coming = deque(
        sorted(({"before": 1, **r} for r in workload["requests"]), key=itemgetter("before"))
    )
    answers = {request["id"]: "" for request in coming}
    free: list[list[int]] = []
    fault: Json | None = None
    ended = None
    with Trace(engine) as trace:
        for step in range(1, workload["most_steps"] + 1):
            if step == workload.get("reset_before"):
                engine.reset_prefix_cache()
            answers |= arrive(engine, coming, step)
            if not engine.has_unfinished_requests():
                break
            try:
                outputs = engine.step()
            except Exception as error:
                ended = f"{type(error).__name__}: {error}"
                fault = fault or {"step": step, "message": ended}
                break
            for output in outputs:
                answers[output.request_id] = output.outputs[0].text
            free.append(sorted(engine.core.scheduler.kv_cache.allocator.free_pages))
            message = broken(engine, trace.data.frames[-1])
            if message and fault is None:
                fault = {"step": step, "message": message}
    return {
        "trace": trace.data.as_json(), "free": free, "fault": fault, "ended": ended,
        "answers": answers,
    }  # fmt: skip


def arrive(engine: LLMEngine, coming: deque[Json], step: int) -> dict[str, str]:
    """Add the requests that arrive before a step. If nothing is left to do, the next one comes.

    Returns what the engine said about those that it refused.
    """
    refused = {}
    while coming and (coming[0]["before"] <= step or not engine.has_unfinished_requests()):
        request = coming.popleft()
        params = SamplingParams(max_tokens=request["max_tokens"], temperature=0, ignore_eos=True)
        try:
            engine.add_request(request["prompt"], params, request["id"])
        except ValueError as error:
            refused[request["id"]] = f"refused: {error}"
    return refused


def broken(engine: LLMEngine, frame: Any) -> str | None:
    """Return which invariant is broken after a step, in the words of the check, or None."""
    try:
        engine.check_invariants()
    except AssertionError as error:
        return str(error)
    if frame.error:
        return f"the forward raised {frame.error}"
    if engine.has_unfinished_requests() and not any(frame.batches):
        return "I5: requests wait, and the step computes nothing"
    return None


if __name__ == "__main__":
    main()
