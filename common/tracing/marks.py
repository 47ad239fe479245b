"""What happens to each request in each batch of a run: the film strip shows it."""

from __future__ import annotations

from collections.abc import Iterator

from .data import TraceData


def marks_of_batches(data: TraceData) -> Iterator[dict[int, str]]:
    """Yield what happens to each request in each batch, in order."""
    computed: dict[int, int] = {}  # tokens, also of batches with results that are not known yet
    for frame, state in data.states():
        for number in frame.retracted:
            computed[number] = 0
        for batch in frame.batches:
            marks = {number: _mark_outside(r["state"]) for number, r in state.requests.items()}
            for number, tokens in batch.items():
                before = computed.get(number, state.requests[number]["cached"] or 0)
                is_prompt = before < data.requests[number].num_prompt_tokens
                marks[number] = "prefill" if is_prompt else "decode"
                computed[number] = before + tokens
            yield marks | dict.fromkeys(frame.retracted, "retract")
        for number, request in state.requests.items():
            known = request["computed"]
            if number in computed:
                computed[number] = known if frame.error else max(computed[number], known)


def _mark_outside(state: str) -> str:
    """Return what happens to a request of that state in a step that does not compute it."""
    return {"waiting": "waiting", "prefill": "stall", "decode": "stall"}.get(state, "absent")
