"""Record the lanes of host and forward, with emulated forwards: they sleep."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from common import EngineConfig, SamplingParams, load_model
from common.displays.demo import chats, machine
from common.tracing.data import Span, TraceData
from common.tracing.trace import Trace
from milestones.chain import load
from milestones.electives.multi_step.in_flight import NUM_STEPS
from milestones.staff.maintain.timelines import emulated

from .record_ideas import TINY

Json = dict[str, Any]
FORWARD_MS, NUM_REQUESTS, NUM_ROUNDS = 10.0, 8, 8  # of the lanes with a grammar
LOOPS = {"plain": 0, "delayed": 1, "waiting": 2}  # names on slides, and places in `gaps.LOOPS`


def lanes(_name: str) -> Json:
    """Record the lanes of steady decode in both loops, with emulated forwards of 10 ms."""
    made: Json = {"machine": machine(), "emulated_forward_ms": 10.0}
    for loop, overlap in (("serial", False), ("overlapped", True)):
        made[loop] = decode_lanes("m5_overlap", overlap)
    return made


def plan_lanes(_name: str) -> Json:
    """Record the lanes of m5 and of multi_step, with emulated forwards of 10 ms."""
    made: Json = {"machine": machine(), "emulated_forward_ms": 10.0}
    for name in ("m5_overlap", "multi_step"):
        made[name] = decode_lanes(name, overlap=True, count=NUM_STEPS + 3, computes=False)
        for number, forward in enumerate(made[name]["forward"], 1):
            forward["step"] = number  # all forwards of a plan are launched by one call of `step`
    return made


def grammar_lanes(_name: str) -> Json:
    """Record the lanes of eight requests in three loops. The forwards sleep for 10 ms.

    It needs the extra `grammar`. Of several rounds, the fastest is kept: other work of the machine
    disturbed it least.
    """
    loaded = load_model(EngineConfig(device="cpu"))
    gaps = load("structured_output", "demo.gaps")
    made: Json = {"machine": machine(), "emulated_forward_ms": FORWARD_MS}
    for name, place in LOOPS.items():
        loop = gaps.LOOPS[place]
        rounds = [
            lanes_of(gaps.traced(loaded, loop, NUM_REQUESTS, FORWARD_MS), count=4)
            for _ in range(NUM_ROUNDS)
        ]
        made[name] = min(rounds, key=lambda found: float(found["forward"][-1]["end"]))
        for number, forward in enumerate(made[name]["forward"], 1):
            forward["step"] = number
    return made


def decode_lanes(milestone: str, overlap: bool, count: int = 5, computes: bool = True) -> Json:
    """Serve 16 chats with emulated forwards of 10 ms. Return the lanes of `count` decode steps.

    computes: False for forwards that only sleep, so that a busy machine does not make them longer.
    """
    loaded = load_model(EngineConfig(model=TINY))
    config = EngineConfig(
        model=TINY, emulated_forward_ms=10.0, enable_overlap=overlap, max_num_seqs=16
    )
    with load(milestone).LLMEngine(config, loaded) as engine, Trace(engine) as trace:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        model = engine.loaded.model
        forward = model.forward
        if not computes:
            model.forward = emulated(model.config.vocab_size)
        try:
            engine.generate(chats(16), params)
        finally:
            model.forward = forward
    return lanes_of(trace.data, count)


def lanes_of(trace: TraceData, count: int) -> Json:
    """Return the spans of consecutive decode steps, in milliseconds since their first forward.

    These are the steps that took the least time, so that other work of the machine does not
    disturb the figure.
    """
    windows = [trace.forwards[i : i + count] for i in range(4, len(trace.forwards) - count)]
    forwards = min(windows, key=lambda window: window[-1].end - window[0].start)
    start, end = forwards[0].start, forwards[-1].end
    kinds = ("launch", "wait", "process", "schedule")

    def rows(spans: list[Span]) -> list[Json]:
        return [
            {**asdict(s), "start": 1000 * (s.start - start), "end": 1000 * (s.end - start)}
            for s in spans
        ]

    host = [s for s in trace.spans if s.name in kinds and s.end > start and s.start < end]
    busy = sum(s.end - s.start for s in forwards) / (end - start)
    return {"forward": rows(forwards), "host": rows(host), "busy": round(busy, 4)}
