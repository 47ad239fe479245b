"""What a trace holds: plain data. A `Frame` a step, which says what changed since the one before.

Deltas keep the files small, and adding them up gives every moment back: `TraceRecord.states` does
it here, the player does it in the browser. Requests and tree nodes go by number, in the order in
which they appeared; all times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

TREE = "tree"  # a page's owner, where it is no request
PageOwner = int | str | None  # a request's number, `TREE`, or None: the page is free

FORMAT_VERSION = 1
TIMES = ("start", "end", "arrival", "first_token")


@dataclass(slots=True)
class Span:
    """Something that took time, in the step of that number. Of one lane, they nest or are apart."""

    name: str
    start: float
    end: float
    step: int


@dataclass(slots=True)
class RequestInfo:
    """What of a request does not change, and when it came and went."""

    request_id: str
    prompt: str  # the end of it
    num_prompt_tokens: int
    max_num_tokens: int
    arrival: float
    first_token: float | None = None
    end: float | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class Frame:
    """One step: what was scheduled, and what is different after it.

    batches: tokens scheduled of each request; one batch a step, or two where an engine fills its
        pipeline.
    retracted: who lost its memory, in order; it may be back in the same step.
    waiting: the queue in order, None where it is as before.
    requests: the fields that changed: `state` (waiting, prefill, decode, stop, length, abort,
        error), `row`, `tokens`, `computed`, `cached`; and `text`, what was added to it.
    pages: the new owner of each page that changed hands.
    nodes: of the radix tree, the fields that changed: `parent` (0: the root), `pages`, `locks`,
        `hits`, `text` (of the first tokens); None: the node is gone.
    stats: the counters of `EngineStats` that changed.
    error: what the step, or its forward, raised.
    """

    step: int
    start: float
    end: float
    batches: list[dict[int, int]] = field(default_factory=list)
    retracted: list[int] = field(default_factory=list)
    waiting: list[int] | None = None
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    pages: dict[int, PageOwner] = field(default_factory=dict)
    nodes: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class State:
    """A moment of the run: what the frames up to it add up to. The fields are a `Frame`'s."""

    waiting: list[int] = field(default_factory=list)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    pages: dict[int, PageOwner] = field(default_factory=dict)
    nodes: dict[int, dict[str, Any]] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

    def apply(self, frame: Frame) -> None:
        """Go on to the moment after a frame."""
        if frame.waiting is not None:
            self.waiting = frame.waiting
        for number, change in frame.requests.items():
            request = self.requests.setdefault(number, {"text": ""})
            request.update(change, text=request["text"] + change.get("text", ""))
        for page, owner in frame.pages.items():
            if owner is None:
                self.pages.pop(page, None)
            else:
                self.pages[page] = owner
        for number, node_change in frame.nodes.items():
            if node_change is None:
                del self.nodes[number]
            else:
                self.nodes.setdefault(number, {}).update(node_change)
        self.stats.update(frame.stats)


@dataclass
class TraceRecord:
    """A run: the lanes, the requests, and the frames.

    meta: the engine, its model and configuration, and how its KV memory is laid out.
    origin: when the trace began; the files count from here.
    spans: the CPU lane. forwards: the other one.
    """

    meta: dict[str, Any]
    origin: float
    requests: list[RequestInfo] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    forwards: list[Span] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    def states(self) -> Iterator[tuple[Frame, State]]:
        """Each frame with the state after it. The state is one object, which goes on."""
        state = State()
        for frame in self.frames:
            state.apply(frame)
            yield frame, state

    def as_json(self) -> dict[str, Any]:
        """For `json.dump`: times since the origin, to the microsecond; nothing that is empty."""
        rows: dict[str, list[Any]] = {
            "requests": self.requests,
            "spans": self.spans,
            "forwards": self.forwards,
            "frames": self.frames,
        }
        return {
            "version": FORMAT_VERSION,
            "meta": self.meta,
            **{name: [self._compact(row) for row in these] for name, these in rows.items()},
        }

    def _compact(self, row: Any) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(row).items() if value not in (None, {})}
        for name in TIMES:
            if name in fields:
                fields[name] = round(fields[name] - self.origin, 6)
        return fields
