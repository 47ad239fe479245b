"""Convert a trace to the Chrome trace-event format; ui.perfetto.dev and chrome://tracing open it.

the engine   CPU      | step: schedule | run | process |     an arrow leads from each
             forward           | forward 7 · 6 tokens  |     schedule to its forward
             pages, tree, queue, batch tokens                drawn as curves
requests     r0 · Why | waiting | prefill | decode     |     one lane for each request
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .data import Frame, RequestInfo, State, TraceData
from .marks import marks_of_batches

ENGINE, REQUESTS = 1, 2  # process ids in the file
PROMPT_CHARACTERS = 40  # of a request's prompt, beside its name
CPU, FORWARD = 1, 2  # thread ids in the process of the engine
# The colours of the viewers, by what is computed.
COLOURS = {"prefill": "rail_response", "decode": "good", "mixed": "rail_animation"}
Event = dict[str, Any]


def chrome_trace(data: TraceData) -> dict[str, Any]:
    """Return the content of the file, for `json.dump`."""
    return {
        "displayTimeUnit": "ms",
        "otherData": data.meta,
        "traceEvents": [
            *_names(data),
            *_lanes(data),
            *_arrows(data),
            *_decisions(data),
            *_counters(data),
            *_requests(data),
        ],
    }


def _names(data: TraceData) -> Iterator[Event]:
    forward = "forward"
    if emulated := data.meta["emulated_forward_ms"]:
        forward = f"forward (emulated: {emulated} ms)"
    yield _name("process_name", ENGINE, 0, f"{data.meta['engine']} · {data.meta['model']}")
    yield _name("process_name", REQUESTS, 0, "requests")
    yield _name("thread_name", ENGINE, CPU, "CPU")
    yield _name("thread_name", ENGINE, FORWARD, forward)
    for number, request in enumerate(data.requests):
        prompt = " ".join(request.prompt.split())[:PROMPT_CHARACTERS]
        yield _name("thread_name", REQUESTS, number, f"{request.request_id} · {prompt}")
        yield {
            **_event("thread_sort_index", "M", REQUESTS, number),
            "args": {"sort_index": number},
        }


def _lanes(data: TraceData) -> Iterator[Event]:
    batches = {frame.step: frame.batches for frame in data.frames}
    kinds = _kinds(data)
    ids = [request.request_id for request in data.requests]
    seen: Counter[tuple[str, int]] = Counter()  # a step may have two schedules and two forwards
    for lane, spans in ((CPU, data.spans), (FORWARD, data.forwards)):
        for span in spans:
            args: dict[str, Any] = {"step": span.step}
            name, kind = span.name, ""
            if span.name in ("schedule", "forward"):
                order = seen[span.name, span.step]
                seen[span.name, span.step] += 1
                own = batches.get(span.step, [])[order:][:1]
                args["tokens"] = {
                    ids[number]: tokens for batch in own for number, tokens in batch.items()
                }
            if span.name == "forward" and own:
                count, kind = sum(own[0].values()), kinds[span.step, order]
                name = f"forward {span.step} · {count} token{'s' * (count != 1)}"
            yield _span(data, name, ENGINE, lane, span.start, span.end, args, kind)


def _kinds(data: TraceData) -> dict[tuple[int, int], str]:
    """Return what each batch computes, by its step and its place in it."""
    places = [(frame.step, place) for frame in data.frames for place in range(len(frame.batches))]
    kinds = {}
    for place, marks in zip(places, marks_of_batches(data), strict=True):
        computed = {"prefill", "decode"} & {*marks.values()}
        kinds[place] = computed.pop() if len(computed) == 1 else "mixed"
    return kinds


def _arrows(data: TraceData) -> Iterator[Event]:
    """Yield an arrow from each schedule that led to a forward to that forward.

    Schedules and forwards are both in order of time.
    """
    schedules = [span for span in data.spans if span.name == "schedule"]
    for number, forward in enumerate(data.forwards):
        while schedules and schedules[0].step < forward.step:
            schedules.pop(0)
        if not schedules or schedules[0].step != forward.step:
            continue
        middle = (schedules[0].start + schedules[0].end) / 2  # an arrow begins inside a span
        schedules.pop(0)
        for phase, lane, at in (("s", CPU, middle), ("f", FORWARD, forward.start)):
            event = _event("forward", phase, ENGINE, lane)
            yield {**event, "cat": "step", "id": number, "ts": _us(data, at), "bp": "e"}


def _decisions(data: TraceData) -> Iterator[Event]:
    """Yield what the scheduler, the cache and the graphs decided, at the start of its step."""
    ids = [request.request_id for request in data.requests]
    for frame in data.frames:
        for decision in frame.decisions:
            args = {"count": decision.count, "reason": decision.reason}
            if decision.request is not None:
                args["request"] = ids[decision.request]
            event = _event(decision.kind, "i", ENGINE, CPU)
            yield {**event, "ts": _us(data, frame.start), "s": "t", "args": args}


def _counters(data: TraceData) -> Iterator[Event]:
    for frame, state in data.states():
        stats, curves = state.stats, {}
        if total := stats["kv_pages_total"]:
            free, cached = stats["kv_pages_free"], stats["kv_pages_cached"]
            curves["pages"] = {"held": total - free - cached, "cached": cached, "free": free}
        if data.meta["has_tree"]:
            locked = sum(bool(node["locks"]) for node in state.nodes.values())
            curves["tree nodes"] = {"locked": locked, "unlocked": len(state.nodes) - locked}
        curves["queue"] = {"waiting": stats["num_waiting"], "running": stats["num_running"]}
        tokens = sum(sum(batch.values()) for batch in frame.batches)
        curves["batch"] = {"tokens": tokens}
        for name, values in curves.items():
            yield {
                **_event(name, "C", ENGINE, 0),
                "ts": _us(data, frame.end),
                "args": values,
            }


def _requests(data: TraceData) -> Iterator[Event]:
    lanes = [Lane(data, n, request) for n, request in enumerate(data.requests)]
    for frame, state in data.states():
        for number in {**frame.requests, **dict.fromkeys(frame.retracted)}:
            yield from lanes[number].see(frame, state)
    for lane in lanes:
        yield from lane.finish()


class Lane:
    """The phases of one request. Each phase ends when the next one begins."""

    def __init__(self, data: TraceData, number: int, request: RequestInfo) -> None:
        self.data, self.number, self.request = data, number, request
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
        yield from self._turn("", self.data.frames[-1].end if end is None else end)
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
            times = (self.since, at, args, self.phase)
            yield _span(self.data, self.phase, REQUESTS, self.number, *times)
        self.phase, self.since = phase, max(at, self.since)

    def _instant(self, name: str, at: float) -> Event:
        event = _event(name, "i", REQUESTS, self.number)
        return {**event, "ts": _us(self.data, at), "s": "t"}


def _event(name: str, phase: str, process: int, thread: int) -> Event:
    return {"name": name, "ph": phase, "pid": process, "tid": thread}


def _name(what: str, process: int, thread: int, name: str) -> Event:
    return {**_event(what, "M", process, thread), "args": {"name": name}}


def _span(
    data: TraceData,
    name: str,
    process: int,
    thread: int,
    start: float,
    end: float,
    args: dict[str, Any],
    kind: str = "",
) -> Event:
    """Return a span. kind: what it computes; a viewer shows it as a colour."""
    begin = _us(data, start)
    duration = round(_us(data, end) - begin, 3)
    event = _event(name, "X", process, thread)
    if kind in COLOURS:
        event |= {"cat": kind, "cname": COLOURS[kind]}
    return {**event, "ts": begin, "dur": duration, "args": args}


def _us(data: TraceData, seconds: float) -> float:
    """Return a time in microseconds since the run began."""
    return round(1e6 * (seconds - data.origin), 3)
