"""The checks of a schedule: `Checker` compares all outputs, and `Progress` finds a stuck engine.

`Progress` also sees the steps inside a call that runs many of them.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from common import PoolingRequestOutput, RequestOutput
from common.outputs import CompletionOutput, PoolingOutput

from .answers import Ending, Source
from .extras import PLAIN
from .plan import PlannedRequest
from .results import SoakError, Tally

LOGPROB_ERROR = 1e-3  # rounding may differ between engines
VECTOR_ERROR = 1e-3  # likewise
MOST_IDLE_STEPS = 30  # steps in a row that compute no token and return no new output
MOST_STEPS_WITHOUT_OUTPUT = 10_000  # of one request; a step may compute one token


@dataclass
class Live:
    """A request that the engine has, and its outputs so far."""

    planned: PlannedRequest
    endings: list[Ending]  # one for each output
    num_tokens: list[int] = field(init=False)
    texts: list[str] = field(init=False)
    may_be_aborted: bool = False
    must_be_aborted: bool = False

    def __post_init__(self) -> None:
        self.num_tokens = [0] * len(self.endings)
        self.texts = [""] * len(self.endings)


class Checker:
    """Knows each request that is not done. Every output must go through `take`."""

    def __init__(self, source: Source, tally: Tally, may_fail: Set[str]) -> None:
        """may_fail: the requests that a failure of a part may end."""
        self.source = source
        self.tally = tally
        self.may_fail = may_fail
        self.live: dict[str, Live] = {}
        self.failed: set[str] = set()  # requests that ended by `error`

    def add(self, request_id: str, planned: PlannedRequest, most_tokens: int) -> None:
        """Expect a request with up to `most_tokens` tokens in prompt and output."""
        limit = most_tokens - len(planned.prompt)
        endings = [
            self.source.ending(answer.token_ids, planned.params, limit)
            for answer in planned.answers
        ]
        self.live[request_id] = Live(planned, endings)
        self.tally.requests += 1
        self.tally.extras += planned.extra != PLAIN

    def forget(self, request_id: str) -> None:
        """Expect no more outputs of a request: its stream was left, or its call was interrupted."""
        del self.live[request_id]

    def take(self, output: RequestOutput) -> None:
        """Check one output. Raises `SoakError`."""
        name, live = output.request_id, self.live.get(output.request_id)
        if live is None:
            raise SoakError("lost", f"{name} has an output after its end")
        if isinstance(output, PoolingRequestOutput):
            self._check_vector(live, name, output.outputs)
        else:
            self._check_outputs(live, name, output)
        if output.finished:
            del self.live[name]

    def _check_vector(self, live: Live, name: str, got: PoolingOutput) -> None:
        expected = live.planned.vector
        if got.finish_reason == "error":
            self._check_error(live, name, 0, got.error)
        elif got.finish_reason == "abort" or live.must_be_aborted:
            self._check_abort(live, name, got.finish_reason)
        elif got.data is None or expected is None or len(got.data) != len(expected):
            raise SoakError("wrong", f"{name} has the vector {got}, not {expected}")
        else:
            size = max(map(abs, expected))
            off = max(abs(a - b) for a, b in zip(got.data.tolist(), expected, strict=True))
            if not off <= VECTOR_ERROR * size:
                raise SoakError("wrong", f"I1: {name} has {got.data}, not {expected}")

    def _check_outputs(self, live: Live, name: str, output: RequestOutput) -> None:
        """Check all n outputs of a request."""
        if len(output.outputs) != len(live.endings):
            raise SoakError("wrong", f"{name} has {len(output.outputs)} outputs: {live}")
        for i, got in enumerate(output.outputs):
            self._check_so_far(live, i, name, got)
        if not output.finished:
            return
        for i, got in enumerate(output.outputs):
            self._check_final(live, i, name, got)
            self.tally.tokens += len(got.token_ids)
        reasons = {got.finish_reason for got in output.outputs}
        if live.must_be_aborted and not reasons & {"abort", "error"}:
            raise SoakError("wrong", f"{name} ends by {reasons}, although it was aborted")

    def _check_so_far(self, live: Live, i: int, name: str, got: CompletionOutput) -> None:
        """I1, I6: the tokens are the first ones of the answer, and the text only grows."""
        answer, count = live.planned.answers[i], len(got.token_ids)
        if got.token_ids != answer.token_ids[:count]:
            raise SoakError("wrong", f"I1: {name} has {got.token_ids}, not {answer.token_ids}")
        if count < live.num_tokens[i] or not got.text.startswith(live.texts[i]):
            raise SoakError("wrong", f"I6: {name} changed its text {live.texts[i]!r}: {got}")
        live.num_tokens[i], live.texts[i] = count, got.text
        if live.planned.params.logprobs is None:
            return
        chosen = [row[token] for row, token in zip(got.logprobs or [], got.token_ids, strict=True)]
        for ours, expected in zip(chosen, answer.logprobs, strict=False):
            if not math.isclose(ours, expected, abs_tol=LOGPROB_ERROR, rel_tol=LOGPROB_ERROR):
                raise SoakError("wrong", f"{name} has log probability {ours}, not {expected}")

    def _check_final(self, live: Live, i: int, name: str, got: CompletionOutput) -> None:
        if got.finish_reason == "error":
            self._check_error(live, name, len(got.token_ids), got.error)
        elif got.finish_reason == "abort":
            self._check_abort(live, name, got.finish_reason)
            if got.text != self.source.text_of(got.token_ids, live.planned.params):
                raise SoakError("wrong", f"I6: {name} was aborted with the text {got.text!r}")
        else:
            self._check_ending(live, i, name, got)

    def _check_abort(self, live: Live, name: str, reason: str) -> None:
        if reason != "abort" or not live.may_be_aborted:
            raise SoakError("wrong", f"{name} ends by {reason}, which does not fit: {live}")
        self.tally.aborts += 1

    def _check_error(self, live: Live, name: str, count: int, error: str | None) -> None:
        """Check that a request ends by `error` at the token with its fault, and only there."""
        fault = live.planned.fault
        self.failed.add(name)
        if fault is None and name not in self.may_fail:
            raise SoakError("wrong", f"{name} ends by error without a fault of its own: {error}")
        if fault is not None:
            before = max(0, fault.position - len(live.planned.prompt) + 1)
            allowed = {before - 1, before} if fault.kind == "text" else {before}
            if count not in allowed:
                raise SoakError("wrong", f"{name} fails after {count} tokens, not {before}")
        if not error:
            raise SoakError("wrong", f"{name} ends by error without a message")
        self.tally.errors += 1

    def _check_ending(self, live: Live, i: int, name: str, got: CompletionOutput) -> None:
        planned, ending = live.planned, live.endings[i]
        fault, most = planned.fault, len(planned.prompt) + len(ending.token_ids)
        if fault is not None and fault.position <= most - 2:
            raise SoakError("wrong", f"{name} ends by {got.finish_reason}, in spite of {fault}")
        if Ending(got.token_ids, got.text, str(got.finish_reason)) != ending:
            raise SoakError("wrong", f"I1: {name} ends as {got}, not as {ending}")


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
