"""Requests with n > 1, for all engines: `add_request` and `abort_request` work on the children.

An engine adds and aborts requests with one output. `EngineBase` wraps these two methods of each
engine, so that no engine has code for n. `OutputProcessor` merges the outputs of the children.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..prompts import Prompt, TokensPrompt
from ..sampling.params import SamplingParams
from ..text.input_processor import InputProcessor
from ..text.output_processor import OutputProcessor

AddRequest = Callable[..., str]
AbortRequest = Callable[..., bool]


class ParallelEngine(Protocol):
    """What the wrappers use of an engine. `EngineBase` implements it."""

    input_processor: InputProcessor
    output_processor: OutputProcessor

    def discard(self, request_ids: Sequence[str]) -> None: ...


def adding_children(add_request: AddRequest) -> AddRequest:
    """Wrap `add_request` so that a request with n > 1 adds n children and returns its own id."""

    @functools.wraps(add_request)
    def add(
        self: ParallelEngine,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **more: Any,
    ) -> str:
        if not isinstance(params, SamplingParams) or params.n == 1:
            return add_request(self, prompt, params, request_id, **more)
        parent = self.input_processor.make_parent(prompt, params, request_id)
        self.output_processor.add_parent(parent)
        shared = TokensPrompt(parent.prompt_token_ids, parent.prompt)
        try:
            for child in parent.children():
                add_request(self, shared, child.params, child.request_id, **more)
        except BaseException:  # none of the children may stay
            self.discard([parent.request_id])
            raise
        return parent.request_id

    return add


def aborting_children(abort_request: AbortRequest) -> AbortRequest:
    """Wrap `abort_request` so that the id of a request with n > 1 aborts all its live children."""

    @functools.wraps(abort_request)
    def abort(self: ParallelEngine, request_id: str) -> bool:
        parent = self.output_processor.find_parent(request_id)
        if parent is None:
            return abort_request(self, request_id)
        aborted = [abort_request(self, child) for child in sorted(parent.unfinished)]
        return any(aborted)

    return abort


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "add_request": adding_children,
    "abort_request": aborting_children,
}
