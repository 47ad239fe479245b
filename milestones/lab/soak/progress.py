"""`Progress`: finds an engine that is stuck, also inside a call that runs many steps."""

from __future__ import annotations

from typing import Any

from common import PoolingRequestOutput, RequestOutput

from .tally import SoakError

MOST_IDLE_STEPS = 30  # steps in a row that compute no token and return no new output
MOST_STEPS_WITHOUT_OUTPUT = 10_000  # of one request; a step may compute one token


def lengths_of(output: RequestOutput) -> list[int]:
    """Return the number of tokens of each output of a request. A vector has none."""
    if isinstance(output, PoolingRequestOutput):
        return []
    return [len(completion.token_ids) for completion in output.outputs]


class Progress:
    """Checks every step of an engine. Raises `SoakError` when the engine or a request is stuck.

    An output counts once. While `generate` runs, the outputs of other requests are kept for later,
    so every step returns them again.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.num_steps = 0
        self.idle_steps = 0
        self.counted = 0  # tokens computed when the last step ended
        self.moved: dict[str, int] = {}  # the step of the last new output of each request
        self.seen: dict[str, tuple[list[int], bool]] = {}  # its lengths, and if it was final

    def check(self, outputs: list[RequestOutput]) -> None:
        """Record the progress of a step."""
        self.num_steps += 1
        held = self.engine.output_processor.live_ids()
        is_new = False
        for output in outputs:
            state = (lengths_of(output), output.finished)
            if self.seen.get(output.request_id) != state:
                is_new = True
                self.seen[output.request_id] = state
                self.moved[output.request_id] = self.num_steps
        for name in held:
            waited = self.num_steps - self.moved.setdefault(name, self.num_steps)
            if waited > MOST_STEPS_WITHOUT_OUTPUT:
                raise SoakError("stuck", f"I5: {name} has had no output for {waited} steps")
        self._check_engine(is_new)

    def _check_engine(self, has_new_outputs: bool) -> None:
        stats = self.engine.stats()
        counted = stats.prefill_tokens + stats.decode_tokens + stats.padding_tokens
        grammars = getattr(self.engine.core.scheduler, "grammars", None)
        compiles = grammars is not None and grammars.queue  # on threads, so it takes some time
        is_idle = not has_new_outputs and counted == self.counted and not compiles
        self.counted = counted
        unfinished = self.engine.has_unfinished_requests()
        self.idle_steps = self.idle_steps + 1 if is_idle and unfinished else 0
        if self.idle_steps > MOST_IDLE_STEPS:
            raise SoakError("stuck", f"I5: {self.idle_steps} steps computed nothing: {stats}")
