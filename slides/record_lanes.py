"""Record the lanes of host and forward, in virtual time. They are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import EngineConfig, SamplingParams, load_model
from common.clock import StepCosts
from common.displays.demo import chats
from common.tracing.data import Span, TraceData
from common.tracing.trace import Trace
from common.virtual_time import use_virtual_time
from milestones.chain import load
from milestones.electives.multi_step.in_flight import NUM_STEPS

from .record_ideas import TINY

Json = dict[str, Any]
NUM_REQUESTS = 8  # of the lanes with a grammar
LOOPS = {"plain": 0, "delayed": 1, "waiting": 2}  # names on slides, and places in `gaps.LOOPS`


def lanes(_name: str) -> Json:
    """Record the lanes of steady decode in both loops."""
    loops = {"serial": False, "overlapped": True}
    return {loop: decode_lanes("m5_overlap", overlap) for loop, overlap in loops.items()}


def plan_lanes(_name: str) -> Json:
    """Record the lanes of m5 and of multi_step."""
    names = ("m5_overlap", "multi_step")
    return {name: numbered(decode_lanes(name, count=NUM_STEPS + 3)) for name in names}


def grammar_lanes(_name: str) -> Json:
    """Record the lanes of eight requests in three loops. It needs the extra `grammar`."""
    loaded = load_model(EngineConfig(device="cpu"))
    gaps = load("structured_output", "demo.gaps")
    made: Json = {}
    for name, place in LOOPS.items():
        trace, _gaps = gaps.traced(
            loaded, gaps.LOOPS[place], StepCosts(), num_requests=NUM_REQUESTS, max_tokens=12
        )
        made[name] = numbered(lanes_of(trace, count=4))
    return made


def numbered(lanes: Json) -> Json:
    """Number the forwards from 1: one call of `step` may launch several of them."""
    for number, forward in enumerate(lanes["forward"], 1):
        forward["step"] = number
    return lanes


def decode_lanes(milestone: str, overlap: bool = True, count: int = 5) -> Json:
    """Serve 16 chats. Return the lanes of `count` decode steps."""
    config = EngineConfig(model=TINY, enable_overlap=overlap, max_num_seqs=16)
    with load(milestone).LLMEngine(config) as engine:
        use_virtual_time(engine)
        with Trace(engine) as trace:
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            engine.generate(chats(16), params, progress=False)
    return lanes_of(trace.data, count)


def lanes_of(trace: TraceData, count: int) -> Json:
    """Return the spans of consecutive decode steps, in milliseconds since their first forward."""
    forwards = trace.forwards[6 : 6 + count]
    start, end = forwards[0].start, forwards[-1].end
    kinds = ("launch", "wait", "process", "schedule")

    def rows(spans: list[Span]) -> list[Json]:
        return [
            {**asdict(s), "start": 1000 * (s.start - start), "end": 1000 * (s.end - start)}
            for s in spans
        ]

    host = [s for s in trace.spans if s.name in kinds and s.end > start and s.start < end]
    busy = sum(s.end - s.start for s in forwards) / (end - start)
    step_ms = 1000 * (forwards[-1].start - start) / (count - 1)  # from launch to launch, mean
    return {
        "costs": trace.meta["step_costs"], "forward": rows(forwards), "host": rows(host),
        "busy": round(busy, 4), "step_ms": round(step_ms, 3),
    }  # fmt: skip


LANES: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "m5_lanes": (("m5_overlap",), lanes),
    "multi_step_lanes": (("m5_overlap", "multi_step"), plan_lanes),
}
WITH_GRAMMARS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "structured_lanes": (("structured_output",), grammar_lanes)
}
