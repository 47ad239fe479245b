"""`Progress`: finds an engine that is stuck, also inside a call that runs many steps."""

from __future__ import annotations

from typing import Any

from common import RequestOutput

from .tally import SoakError

MOST_IDLE_STEPS = 30  # in a row: no token is computed and no output comes
MOST_STEPS_WITHOUT_OUTPUT = 3000  # of one request


class Progress:
    """Looks at every step of an engine. Raises `SoakError` when nothing, or a request, is stuck."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        stats = engine.stats()
        has_pages = stats.kv_pages_total > 0
        self.pool_tokens = stats.kv_pages_total * engine.config.page_size if has_pages else None
        self.num_steps = 0
        self.idle_steps = 0
        self.counted = 0  # tokens computed when the last step ended
        self.moved: dict[str, int] = {}  # the step of the last output of each request

    def expect(self, request_id: str) -> None:
        """From this step on, a request should get outputs."""
        self.moved[request_id] = self.num_steps

    def check(self, outputs: list[RequestOutput]) -> None:
        """Note what a step has moved."""
        self.num_steps += 1
        for output in outputs:
            if output.finished:
                self.moved.pop(output.request_id, None)
            elif output.request_id in self.moved:
                self.moved[output.request_id] = self.num_steps
        self._check_engine(bool(outputs))
        held = self.engine.output_processor.requests
        for name, last in list(self.moved.items()):
            if name not in held:
                del self.moved[name]
            elif self.num_steps - last > MOST_STEPS_WITHOUT_OUTPUT:
                raise SoakError(
                    "stuck", f"I5: {name} has no output for {self.num_steps - last} steps"
                )

    def _check_engine(self, has_outputs: bool) -> None:
        stats = self.engine.stats()
        counted = stats.prefill_tokens + stats.decode_tokens + stats.padding_tokens
        is_idle = not has_outputs and counted == self.counted
        self.counted = counted
        unfinished = self.engine.has_unfinished_requests()
        self.idle_steps = self.idle_steps + 1 if is_idle and unfinished else 0
        if self.idle_steps > MOST_IDLE_STEPS:
            raise SoakError("stuck", f"I5: {self.idle_steps} steps computed nothing: {stats}")
