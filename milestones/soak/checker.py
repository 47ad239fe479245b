"""`Checker`: compares every output of a schedule with the answer that its request must have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common import RequestOutput
from common.outputs import CompletionOutput

from .answers import Ending, Source
from .plan import PlannedRequest
from .tally import SoakError, Tally

LOGPROB_ERROR = 1e-3  # rounding may differ between engines


@dataclass
class Live:
    """A request that the engine has, and its outputs so far."""

    planned: PlannedRequest
    ending: Ending
    num_tokens: int = 0
    text: str = ""
    may_be_aborted: bool = False
    must_be_aborted: bool = False


class Checker:
    """Knows each request that is not done. Every output must go through `take`."""

    def __init__(self, source: Source, tally: Tally) -> None:
        self.source = source
        self.tally = tally
        self.live: dict[str, Live] = {}

    def add(self, request_id: str, planned: PlannedRequest, most_tokens: int) -> None:
        """Expect a request with up to `most_tokens` tokens in prompt and output."""
        limit = most_tokens - len(planned.prompt)
        ending = self.source.ending(planned.answer.token_ids, planned.params, limit)
        self.live[request_id] = Live(planned, ending)
        self.tally.requests += 1

    def forget(self, request_id: str) -> None:
        """Expect no more outputs of a request: its stream was left, or its call was interrupted."""
        del self.live[request_id]

    def take(self, output: RequestOutput) -> None:
        """Check one output. Raises `SoakError`."""
        live = self.live.get(output.request_id)
        if live is None:
            raise SoakError("lost", f"{output.request_id} has an output after its end")
        completion = output.outputs[0]
        self._check_so_far(live, output.request_id, completion)
        if output.finished:
            self._check_final(live, output.request_id, completion)
            self.tally.tokens += len(completion.token_ids)
            del self.live[output.request_id]

    def _check_so_far(self, live: Live, name: str, got: CompletionOutput) -> None:
        """I1, I6: the tokens are the first ones of the answer, and the text only grows."""
        answer, count = live.planned.answer, len(got.token_ids)
        if got.token_ids != answer.token_ids[:count]:
            raise SoakError("wrong", f"I1: {name} has {got.token_ids}, not {answer.token_ids}")
        if count < live.num_tokens or not got.text.startswith(live.text):
            raise SoakError("wrong", f"I6: {name} changed its earlier text {live.text!r}: {got}")
        live.num_tokens, live.text = count, got.text
        if live.planned.params.logprobs is None:
            return
        chosen = [row[token] for row, token in zip(got.logprobs or [], got.token_ids, strict=True)]
        for ours, expected in zip(chosen, answer.logprobs, strict=False):
            if not math.isclose(ours, expected, abs_tol=LOGPROB_ERROR, rel_tol=LOGPROB_ERROR):
                raise SoakError("wrong", f"{name} has log probability {ours}, not {expected}")

    def _check_final(self, live: Live, name: str, got: CompletionOutput) -> None:
        if got.finish_reason == "error":
            self._check_error(live, name, got)
        elif got.finish_reason == "abort" or live.must_be_aborted:
            self._check_abort(live, name, got)
        else:
            self._check_ending(live, name, got)

    def _check_abort(self, live: Live, name: str, got: CompletionOutput) -> None:
        if got.finish_reason != "abort" or not live.may_be_aborted:
            raise SoakError(
                "wrong", f"{name} ends by {got.finish_reason}, which does not fit: {live}"
            )
        if got.text != self.source.text_of(got.token_ids, live.planned.params):
            raise SoakError("wrong", f"I6: {name} was aborted with the text {got.text!r}")
        self.tally.aborts += 1

    def _check_error(self, live: Live, name: str, got: CompletionOutput) -> None:
        """Check that a request ends by `error` at the token with its fault, and only there."""
        fault, count = live.planned.fault, len(got.token_ids)
        if fault is None:
            raise SoakError("wrong", f"{name} ends by error without a fault of its own: {got}")
        before = max(0, fault.position - len(live.planned.prompt) + 1)
        allowed = {before - 1, before} if fault.kind == "text" else {before}
        if count not in allowed:
            raise SoakError("wrong", f"{name} fails after {count} tokens, not {before}: {fault}")
        if not getattr(got, "error", None):
            raise SoakError("wrong", f"{name} ends by error without a message")
        self.tally.errors += 1

    def _check_ending(self, live: Live, name: str, got: CompletionOutput) -> None:
        planned, ending = live.planned, live.ending
        fault, most = planned.fault, len(planned.prompt) + len(ending.token_ids)
        if fault is not None and fault.position <= most - 2:
            raise SoakError("wrong", f"{name} ends by {got.finish_reason}, in spite of {fault}")
        if Ending(got.token_ids, got.text, str(got.finish_reason)) != ending:
            raise SoakError("wrong", f"I1: {name} ends as {got}, not as {ending}")
