"""The spans of a trace in the Chrome format, by lane, and the time of each name in a window.

`torch.profiler` writes such traces, and so do vLLM's profiler and `--trace` of our demos. Only
complete events (`"ph": "X"`) are read. Times are in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

STEPS = ("step", "ProfilerStep#")  # how the span of a step begins: here, and in `torch.profiler`
REQUESTS = "requests"  # a process in traces of ours: the states of requests, which are no work
PROFILER = "Trace"  # the category of the profiler's own span, which is around everything

Json = dict[str, Any]
Lane = tuple[str, str]  # a process and a thread


@dataclass(frozen=True)
class Span:
    """A named part of a lane, from `start` to `end`."""

    name: str
    lane: Lane
    start: float
    end: float


@dataclass
class Part:
    """What one name takes in a window, without the spans inside its own."""

    name: str
    count: int = 0
    time: float = 0.0


@dataclass(frozen=True)
class ChromeTrace:
    """The spans of a trace, and the names of its lanes."""

    spans: list[Span]
    names: dict[Lane, str]

    @staticmethod
    def of(document: Any) -> ChromeTrace:
        """Read a trace. Raises `ValueError` if it has no complete events."""
        events: list[Json] = document["traceEvents"] if isinstance(document, dict) else document
        threads: dict[Lane, str] = {}
        left_out = set()
        for event in events:
            name = event["args"].get("name") if event.get("ph") == "M" else None
            if name and event["name"] == "thread_name":
                threads[lane_of(event)] = name
            elif name == REQUESTS and event["name"] == "process_name":
                left_out.add(lane_of(event)[0])
        spans = [
            Span(e["name"], lane_of(e), e["ts"], e["ts"] + e["dur"])
            for e in events
            if is_complete(e) and lane_of(e)[0] not in left_out
        ]
        if not spans:
            raise ValueError('the trace has no complete events ("ph": "X")')
        return ChromeTrace(spans, threads)

    def step(self, number: int | None = None, name: str | None = None) -> Span:
        """Return the span of a step: the one with this number, or of the median duration.

        name: how the span's name begins. None: one of `STEPS`. Raises `ValueError`.
        """
        wanted = STEPS if name is None else (name,)
        steps = sorted((s for s in self.spans if s.name.startswith(wanted)), key=lambda s: s.start)
        if not steps:
            raise ValueError(f"no span begins with {' or '.join(wanted)}; name one with --span")
        if number is None:
            middle = median_low(span.end - span.start for span in steps)
            return next(span for span in steps if span.end - span.start == middle)
        if not 1 <= number <= len(steps):
            raise ValueError(f"--step must be from 1 to {len(steps)}, got {number}")
        return steps[number - 1]

    def parts(self, window: Span) -> dict[Lane, list[Part]]:
        """Return the parts of each lane in a window, the longest first, without the window."""
        lanes: dict[Lane, list[Span]] = {window.lane: []}
        for span in self.spans:
            if span.start < window.end and span.end > window.start:
                lanes.setdefault(span.lane, []).append(span)
        found = {lane: self_times(spans, window) for lane, spans in lanes.items()}
        return {lane: parts for lane, parts in found.items() if parts}


def self_times(spans: Iterable[Span], window: Span) -> list[Part]:
    """Return what each name takes in a window of one lane, the longest first.

    At each moment, the span that began last has the time, so that nested spans count once. The
    window itself names nothing: its own time is left out.
    """
    parts: dict[str, Part] = {}
    is_open: list[Span] = []
    now = window.start

    def advance(until: float) -> None:
        nonlocal now
        while is_open and now < until:
            span = is_open[-1]
            end = min(span.end, until)
            if end > now:
                if span != window:
                    parts[span.name].time += end - now
                now = end
            if span.end <= now:
                is_open.pop()
        now = max(now, until)

    for span in sorted(spans, key=lambda s: (s.start, s is not window, -s.end)):
        advance(min(max(span.start, window.start), window.end))
        is_open.append(span)
        if span != window:
            parts.setdefault(span.name, Part(span.name)).count += 1
    advance(window.end)
    return sorted(parts.values(), key=lambda part: -part.time)


def lane_of(event: Json) -> Lane:
    """Return the process and the thread of an event."""
    return str(event.get("pid")), str(event.get("tid"))


def is_complete(event: Json) -> bool:
    """Whether an event is a span with a duration, and not the profiler's own."""
    return event.get("ph") == "X" and "dur" in event and event.get("cat") != PROFILER


def read(path: Path) -> Any:
    """Return the document of a trace file, compressed with gzip or not. Raises `ValueError`."""
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is not a Chrome trace: {error}") from error
