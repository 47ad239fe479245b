"""`Plan`: one random schedule as plain data.

All milestones get the same plan, so a schedule that fails on one can be tried on another. An
elective gets a plan of its own, with what it adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from common import PoolingParams, SamplingParams, StructuredOutputsParams

from .answers import Continuation
from .extras import PLAIN, Extra

How = Literal["add", "generate", "stream", "refused"]
FaultKind = Literal["forward", "logits", "text"]


@dataclass(frozen=True)
class Fault:
    """An injected failure of one request.

    forward: each forward that feeds this request's token at `position` raises.
    logits: the logits after this request's token at `position` have no finite distribution.
    text: the detokenizer raises for the output token at `position`.
    """

    kind: FaultKind
    position: int  # in prompt and output together
    token: int  # the token at `position`; no other request of the plan has it there


@dataclass
class PartFault:
    """A failure of a part of a step.

    step: the number of the first schedule in which it may fail. skip: calls that do not fail.
    is_late: the part does its work before it fails.
    victim: only calls for this request fail; None: any call. grammar: that of the victim.
    lasts: it fails as long as the victim lives, and not only once.
    """

    part: str
    step: int
    skip: int
    is_late: bool
    victim: str | None = None
    grammar: StructuredOutputsParams | None = None
    lasts: bool = False
    skipped: int = 0


@dataclass
class PlannedRequest:
    """A request, its certain answers, and the events of its life."""

    name: str
    prompt: list[int]
    params: SamplingParams
    answers: list[Continuation]  # one for each of its n outputs
    extra: Extra = PLAIN
    vector: list[float] | None = None  # in place of all answers
    fault: Fault | None = None
    abort_after: int | None = None  # steps after its arrival
    leave_after: int | None = None  # outputs of a stream

    @property
    def all_tokens(self) -> list[list[int]]:
        """Prompt and output, as if nothing ended it before `max_tokens`, for each output."""
        return [self.prompt + answer.token_ids for answer in self.answers]

    @property
    def asked(self) -> SamplingParams | PoolingParams:
        """The parameters that the engine gets."""
        return self.extra.pooling or self.params


@dataclass(frozen=True)
class Arrival:
    """One call before step `tick`, with the requests that it brings."""

    tick: int
    how: How
    requests: list[PlannedRequest]
    bad: int = 0  # which kind of bad input


@dataclass
class Plan:
    """A schedule: the engine's configuration, the arrivals, and the failures."""

    seed: int
    number: int
    model: str
    config: dict[str, Any]
    arrivals: list[Arrival]
    retract_every: int | None
    part_faults: list[PartFault] = field(default_factory=list)
    afterwards: list[Arrival] = field(default_factory=list)  # when the other requests have ended
    may_die: bool = False  # a failure of a part may end the engine
    may_fail: set[str] = field(default_factory=set)  # requests that this failure may end
    reset_every: int | None = None  # steps between two calls of `reset_prefix_cache`
    interrupt_chance: float = 0.0  # of each call
    stranger_at: int | None = None  # the step before which another thread calls the engine

    def remove_failures(self) -> None:
        """Remove all injected failures."""
        self.part_faults = []
        for arrival in self.arrivals:
            for request in arrival.requests:
                request.fault = None
