"""The content of a trace, as plain data. Each step has a `Frame`, which holds what changed in it.

Storing only changes keeps the files small. The state at any moment is the sum of all changes up to
it: `TraceData.states` computes it here, and the player computes it in the browser. Requests and
tree nodes are identified by numbers, in the order in which they appeared. All times are in seconds
of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

TREE = "tree"  # the owner of a page in the radix tree
PageOwner = int | str | None  # a request's number, `TREE`, or None: the page is free

FORMAT_VERSION = 3
TIMES = ("start", "end", "arrival", "first_token")


@dataclass(slots=True)
class Span:
    """A named interval of time in a step. Spans of one lane are nested or do not overlap."""

    name: str
    start: float
    end: float
    step: int


@dataclass(slots=True)
class RequestInfo:
    """The constant properties of a request, and the times of its events.

    number: names the request in frames. Requests have numbers in the order in which they appeared.
    """

    number: int
    request_id: str
    prompt: str  # only the last tokens
    num_prompt_tokens: int
    max_num_tokens: int
    arrival: float
    first_token: float | None = None
    end: float | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class FrameDecision:
    """A `Decision` of a step. `request` is a number as in frames."""

    kind: str
    request: int | None
    count: int
    reason: str


@dataclass(slots=True)
class Frame:
    """One step: what was scheduled, and what changed.

    batches: for each batch, the number of scheduled tokens of each request. A step has one batch,
        or two if the engine fills its pipeline.
    decisions: what the engine decided, in order.
    waiting: the queue in order; None if it did not change.
    requests: the fields that changed: `state` (waiting, prefill, decode, stop, length, abort,
        error), `row`, `tokens`, `computed`, `cached`, `node` (the last node of the prefix that the
        request holds in the radix tree), `pages` (its page table); and `text`, the text that was
        added.
    pages: the new owner of each page with a new owner.
    nodes: the fields of radix tree nodes that changed: `parent` (0: the root), `pages`, `locks`,
        `hits`, `text` (of the first tokens). None: the node was removed.
    stats: the counters of `EngineStats` that changed.
    error: the exception that the step or its forward raised.
    """

    step: int
    start: float
    end: float
    batches: list[dict[int, int]] = field(default_factory=list)
    decisions: list[FrameDecision] = field(default_factory=list)
    waiting: list[int] | None = None
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    pages: dict[int, PageOwner] = field(default_factory=dict)
    nodes: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def retracted(self) -> list[int]:
        """The requests that lost their memory, in order. The step may admit one again."""
        return [d.request for d in self.decisions if d.kind == "retract" and d.request is not None]


@dataclass(slots=True)
class State:
    """The state at one moment of a run, the sum of all frames up to it. Fields as in `Frame`."""

    waiting: list[int] = field(default_factory=list)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    pages: dict[int, PageOwner] = field(default_factory=dict)
    nodes: dict[int, dict[str, Any]] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

    def apply(self, frame: Frame) -> None:
        """Advance to the moment after a frame."""
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
class TraceData:
    """A recorded run: the lanes, the requests, and the frames.

    meta: the engine, its model and configuration, and the layout of its KV memory.
    origin: the time when the trace began. Times in files are relative to it.
    spans: the CPU lane. forwards: the forward lane.
    """

    meta: dict[str, Any]
    origin: float
    requests: list[RequestInfo] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    forwards: list[Span] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    def states(self) -> Iterator[tuple[Frame, State]]:
        """Yield each frame with the state after it.

        The state is always the same object: the next frame changes it.
        """
        state = State()
        for frame in self.frames:
            state.apply(frame)
            yield frame, state

    def as_json(self) -> dict[str, Any]:
        """Return the data for `json.dump`.

        Times are relative to the origin, in seconds, rounded to microseconds. Fields that are None
        or an empty dict are left out.
        """
        return {"version": FORMAT_VERSION, "meta": self.meta, **self.rows()}

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the four lists of `as_json`. Dicts and lists inside them are not copied."""
        rows: dict[str, list[Any]] = {
            "requests": self.requests,
            "spans": self.spans,
            "forwards": self.forwards,
            "frames": self.frames,
        }
        return {name: [self._compact(row) for row in these] for name, these in rows.items()}

    def _compact(self, row: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name in row.__slots__:
            value = getattr(row, name)
            if name in TIMES and value is not None:
                value = round(value - self.origin, 6)
            elif name == "decisions":
                value = [asdict(decision) for decision in value]
            if value is not None and value != {}:
                fields[name] = value
        return fields
