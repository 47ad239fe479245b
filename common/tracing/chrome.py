"""Convert a trace to the Chrome trace-event format; ui.perfetto.dev and chrome://tracing open it.

the engine   CPU      | step: schedule | run | process |     an arrow leads from each
             forward              | forward |                schedule to its forward
             pages, tree, queue, batch tokens                drawn as curves
requests     r0       | waiting | prefill | decode     |     one lane for each request
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .record import Frame, RequestInfo, State, TraceRecord

ENGINE, REQUESTS = 1, 2  # process ids in the file
CPU, FORWARD = 1, 2  # thread ids in the process of the engine
Event = dict[str, Any]


def chrome_trace(record: TraceRecord) -> dict[str, Any]:
    """Return the content of the file, for `json.dump`."""
    return {
        "displayTimeUnit": "ms",
        "otherData": record.meta,
        "traceEvents": [
            *_names(record),
            *_lanes(record),
            *_arrows(record),
            *_counters(record),
            *_requests(record),
        ],
    }


def _names(record: TraceRecord) -> Iterator[Event]:
    forward = "forward"
    if emulated := record.meta["emulated_forward_ms"]:
        forward = f"forward (emulated: {emulated} ms)"
    yield _name("process_name", ENGINE, 0, f"{record.meta['engine']} · {record.meta['model']}")
    yield _name("process_name", REQUESTS, 0, "requests")
    yield _name("thread_name", ENGINE, CPU, "CPU")
    yield _name("thread_name", ENGINE, FORWARD, forward)
    for number, request in enumerate(record.requests):
        yield _name("thread_name", REQUESTS, number, request.request_id)
        yield {
            **_event("thread_sort_index", "M", REQUESTS, number),
            "args": {"sort_index": number},
        }


def _lanes(record: TraceRecord) -> Iterator[Event]:
    batches = {frame.step: frame.batches for frame in record.frames}
    ids = [request.request_id for request in record.requests]
    for lane, spans in ((CPU, record.spans), (FORWARD, record.forwards)):
        for span in spans:
            args: dict[str, Any] = {"step": span.step}
            if span.name in ("schedule", "forward"):
                args["tokens"] = {
                    ids[number]: tokens
                    for batch in batches.get(span.step, [])
                    for number, tokens in batch.items()
                }
            yield _span(record, span.name, ENGINE, lane, span.start, span.end, args)


def _arrows(record: TraceRecord) -> Iterator[Event]:
    """Yield an arrow from each schedule that led to a forward to that forward.

    Schedules and forwards are both in order of time.
    """
    schedules = [span for span in record.spans if span.name == "schedule"]
    for number, forward in enumerate(record.forwards):
        while schedules and schedules[0].step < forward.step:
            schedules.pop(0)
        if not schedules or schedules[0].step != forward.step:
            continue
        middle = (schedules[0].start + schedules[0].end) / 2  # an arrow begins inside a span
        schedules.pop(0)
        for phase, lane, at in (("s", CPU, middle), ("f", FORWARD, forward.start)):
            event = _event("forward", phase, ENGINE, lane)
            yield {**event, "cat": "step", "id": number, "ts": _us(record, at), "bp": "e"}


def _counters(record: TraceRecord) -> Iterator[Event]:
    for frame, state in record.states():
        stats, curves = state.stats, {}
        if total := stats["kv_pages_total"]:
            free, cached = stats["kv_pages_free"], stats["kv_pages_cached"]
            curves["pages"] = {"held": total - free - cached, "cached": cached, "free": free}
        if record.meta["has_tree"]:
            locked = sum(bool(node["locks"]) for node in state.nodes.values())
            curves["tree nodes"] = {"locked": locked, "unlocked": len(state.nodes) - locked}
        curves["queue"] = {"waiting": stats["num_waiting"], "running": stats["num_running"]}
        tokens = sum(sum(batch.values()) for batch in frame.batches)
        curves["batch"] = {"tokens": tokens}
        for name, values in curves.items():
            yield {
                **_event(name, "C", ENGINE, 0),
                "ts": _us(record, frame.end),
                "args": values,
            }


def _requests(record: TraceRecord) -> Iterator[Event]:
    lanes = [Lane(record, n, request) for n, request in enumerate(record.requests)]
    for frame, state in record.states():
        for number in {**frame.requests, **dict.fromkeys(frame.retracted)}:
            yield from lanes[number].see(frame, state)
    for lane in lanes:
        yield from lane.finish()


class Lane:
    """The phases of one request. Each phase ends when the next one begins."""

    def __init__(self, record: TraceRecord, number: int, request: RequestInfo) -> None:
        self.record, self.number, self.request = record, number, request
        self.phase, self.since = "waiting", request.arrival

    def see(self, frame: Frame, state: State) -> Iterator[Event]:
        """Yield the events of a frame in which the request changed or was retracted."""
        now = state.requests[self.number]["state"]
        scheduled = any(self.number in batch for batch in frame.batches)
        for _ in range(frame.retracted.count(self.number)):
            yield from self._turn("waiting", frame.start)
            yield self._instant("retracted", frame.start)
        if self.phase == "waiting" and scheduled and frame.error is None:
            yield from self._turn("prefill", frame.start)
        if self.phase == "prefill" and now not in ("waiting", "prefill"):
            yield from self._turn("decode", frame.end)

    def finish(self) -> Iterator[Event]:
        """Yield the last phase, and the end of the request if it ended during the run."""
        end, reason = self.request.end, self.request.finish_reason
        yield from self._turn("", self.record.frames[-1].end if end is None else end)
        if reason is not None and end is not None:
            name = reason if reason in ("abort", "error") else f"finish ({reason})"
            yield self._instant(name, end)

    def _turn(self, phase: str, at: float) -> Iterator[Event]:
        """End the current phase at `at` and begin the next.

        A phase never ends after its request: the frame in which a request begins to decode may end
        after the request.
        """
        if self.request.end is not None:
            at = min(at, self.request.end)
        if at > self.since:
            args = {"prompt tokens": self.request.num_prompt_tokens}
            yield _span(self.record, self.phase, REQUESTS, self.number, self.since, at, args)
        self.phase, self.since = phase, max(at, self.since)

    def _instant(self, name: str, at: float) -> Event:
        event = _event(name, "i", REQUESTS, self.number)
        return {**event, "ts": _us(self.record, at), "s": "t"}


def _event(name: str, phase: str, process: int, thread: int) -> Event:
    return {"name": name, "ph": phase, "pid": process, "tid": thread}


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {**_event(what, "M", process, thread), "args": {"name": name}}


def _span(
    record: TraceRecord,
    name: str,
    process: int,
    thread: int,
    start: float,
    end: float,
    args: dict[str, Any],
) -> Event:
    begin = _us(record, start)
    duration = round(_us(record, end) - begin, 3)
    event = _event(name, "X", process, thread)
    return {**event, "ts": begin, "dur": duration, "args": args}


def _us(record: TraceRecord, seconds: float) -> float:
    """Return a time in microseconds since the run began."""
    return round(1e6 * (seconds - record.origin), 3)
