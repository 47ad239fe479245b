"""What an `EngineCore` and the engine around it exchange: plain data, and one error."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .outputs import EngineStats, FinishReason
from .request import Request

# A token and, if they are requested, log probabilities by token id. The token is None if its logits
# are not a valid distribution (NaN or inf).
SampledToken = tuple[int | None, dict[int, float] | None]


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step gave one request.

    new_tokens: the tokens that the step added to `request.token_ids`, usually one.
    finish_reason: why the core has ended the request, or None. Stop strings are not the core's
        matter, because they need text.
    error: one sentence that says what went wrong, if the finish reason is `error`.
    """

    request: Request
    new_tokens: Sequence[SampledToken] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


class ForwardError(Exception):
    """A forward failed and was undone: its requests are in the same state as before the step."""

    def __init__(
        self,
        requests: Sequence[Request],
        error: BaseException,
        outputs: Sequence[EngineCoreOutput] = (),
    ) -> None:
        """requests: those that the failed forward would have computed.

        outputs: what the core's step had made before it failed.
        """
        super().__init__(f"{type(error).__name__}: {error}")
        self.requests = requests
        self.error = error
        self.outputs = list(outputs)


class SchedulerProtocol(Protocol):
    """What the engine around a core uses of its scheduler."""

    waiting: deque[Request]
    running: list[Request]


class EngineCoreProtocol(Protocol):
    """The calls of a core. Each milestone has one: the scheduler, the memory and the model."""

    @property
    def scheduler(self) -> SchedulerProtocol: ...

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `ValueError` if it cannot be served (I4)."""

    def step(self) -> list[EngineCoreOutput]:
        """Run one iteration. It never returns a token of a request that has ended.

        Raises `ForwardError` after a failed forward has been undone. `send_back` must follow.
        """

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request now, and free what it holds. A request that has ended stays as it is."""

    def send_back(self) -> None:
        """Undo the steps in flight, and let all running requests wait again, with their tokens."""

    def reset_prefix_cache(self) -> int:
        """Free the cached pages of requests that have ended. Return the number of freed pages."""

    def stats(self) -> EngineStats:
        """Return the counters."""

    def check_invariants(self) -> None:
        """Raise `AssertionError`, naming the invariant, if the core's state is broken."""

    def close(self) -> None:
        """Free the memory. No call may follow."""


def append_token(request: Request, sampled: SampledToken) -> EngineCoreOutput:
    """Append the token that a step sampled for a request, and end the request if it must end.

    Stop tokens and lengths end it here; stop strings are found later, in its text. The caller frees
    what an ended request holds.
    """
    token_id, logprobs = sampled
    if token_id is None:
        request.finish_reason = "error"
        error = "the model's logits for the next token are not finite"
        return EngineCoreOutput(request, finish_reason="error", error=error)
    request.token_ids.append(token_id)
    if request.logprobs is not None:
        assert logprobs is not None, (
            "a request that asks for logprobs must get them with each token"
        )
        request.logprobs.append(logprobs)
    if token_id in request.stop_token_ids:
        request.finish_reason = "stop"
    elif len(request.token_ids) >= request.max_num_tokens:
        request.finish_reason = "length"
    return EngineCoreOutput(request, (sampled,), request.finish_reason)
