"""Record the timelines of m5's exercise: `python -m milestones.staff.maintain.timelines`.

`m5_overlap/timelines.json` has six runs of the engine. One is as it should be, and each of the
others has a fault that changes no answer. The runs are in virtual time, and so are the faults, so
another recording is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.clock import StepCosts
from common.tracing.data import Span, TraceData
from common.tracing.trace import Trace
from common.virtual_time import use_virtual_time

from ...chain import load
from ...recording import write

Json = dict[str, Any]
FILE = Path(__file__).resolve().parents[2] / "m5_overlap" / "timelines.json"
NUM_STEPS, MORE_STEPS, WARM_UP = 5, 9, 8
NUM_REQUESTS, PROMPT, OUTPUT = 16, 12, 40
SLOW_SECONDS = 0.006  # longer than a forward


def main() -> None:
    """Run the engine once for each fault, and write the file."""
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"))
    write(FILE, record(loaded))


def record(loaded: LoadedModel) -> Json:
    """Return the runs in the order of the picture, and what a step takes in them."""
    runs = [{"fault": name, **run(name, loaded)} for name in ORDER]
    return {"costs": str(StepCosts()), "num_requests": NUM_REQUESTS, "runs": runs}


def run(name: str, loaded: LoadedModel) -> Json:
    """Serve 16 requests with a fault. Return the lanes of a few steps, in milliseconds."""
    memory = SHORT if name == "retractions" else {"page_size": 4, "num_pages": 320}
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=NUM_REQUESTS, seed=0, **memory
    )
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    engine: Any = load("m5_overlap").LLMEngine(config, loaded)
    use_virtual_time(engine)
    FAULTS[name](engine)
    with engine, Trace(engine) as trace:
        for number in range(NUM_REQUESTS):
            prompt = [1 + (7 * number + place) % 250 for place in range(PROMPT)]
            engine.add_request(prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        retractions = engine.stats().num_retractions
    return {**lanes(trace.data, recomputes=name == "retractions"), "retractions": retractions}


def lanes(trace: TraceData, recomputes: bool) -> Json:
    """Return the lanes of the first decode steps after the warm-up, each forward with its tokens.

    recomputes: more steps, of which two compute prompts again and most wait for a result.
    """
    batches = chain.from_iterable(frame.batches for frame in trace.frames)
    tokens = [sum(batch.values()) for batch in batches]
    numbered = list(zip(trace.forwards, tokens, strict=False))[WARM_UP:]
    window = numbered[:NUM_STEPS]
    if recomputes:
        windows = [numbered[i : i + MORE_STEPS] for i in range(len(numbered) - MORE_STEPS)]
        windows = [w for w in windows if sum(n > NUM_REQUESTS for _, n in w) >= 2]
        window = max(windows, key=lambda w: sum(gaps([span for span, _ in w])))
    start, end = window[0][0].start, window[-1][0].end
    named = ("launch", "process", "wait")
    host = [s for s in trace.spans if s.name in named and s.end > start and s.start < end]
    busy = sum(span.end - span.start for span, _ in window) / (end - start)
    return {
        "forward": [{**row(span, start), "tokens": count} for span, count in window],
        "host": [row(span, start) for span in host],
        "busy": round(busy, 4),
    }


def gaps(forwards: list[Span]) -> list[float]:
    """Return the seconds between each forward and the next one."""
    return [after.start - before.end for before, after in pairwise(forwards)]


def row(span: Span, origin: float) -> Json:
    """Return a span with times in milliseconds since the first forward."""
    start, end = (round(1000 * (t - origin), 3) for t in (span.start, span.end))
    return {"name": span.name, "start": start, "end": end, "step": span.step}


def no_fault(engine: Any) -> None:
    """Change nothing."""


def serial(engine: Any) -> None:
    """Let the scheduler ask for the result of each step before it plans the next one."""
    engine.core.scheduler.needs_result = lambda: True


def sync_in_launch(engine: Any) -> None:
    """Wait for the device while a step is launched, as one `.item()` does."""
    launch = engine.core.runner.launch

    def waiting(*args: Any) -> Any:
        result = launch(*args)
        result.done.wait()
        return result

    engine.core.runner.launch = waiting


def no_graph(engine: Any) -> None:
    """Launch the kernels of a forward one by one. It begins with the first kernel, and cannot end
    before the last one is launched."""
    stream, clock = engine.core.runner.stream, engine.clock
    launch = stream.launch

    def one_by_one(work: Callable[[], None]) -> Any:
        all_launched = clock.now() + SLOW_SECONDS

        def gated() -> None:
            work()
            clock.charge(max(0.0, all_launched - clock.work.end))

        event = launch(gated)
        clock.charge(SLOW_SECONDS)
        return event

    stream.launch = one_by_one


def slow_text(engine: Any) -> None:
    """Let the text of a step take longer than its forward, as a slow detokenizer does."""
    process = engine.process

    def slow(results: Any) -> None:
        engine.clock.charge(SLOW_SECONDS)
        process(results)

    engine.process = slow


def retractions(engine: Any) -> None:
    """Let admission count only the tokens that a request has, and none that it will generate."""
    kv_cache = engine.core.scheduler.kv_cache
    engine.core.scheduler.admission.expected_pages = lambda r: kv_cache.pages_for(r.num_tokens)


SHORT: Json = {"page_size": 4, "num_pages": 60}  # pages for a part of the requests
FAULTS: dict[str, Callable[[Any], None]] = {
    "none": no_fault, "serial": serial, "sync": sync_in_launch, "graph": no_graph,
    "text": slow_text, "retractions": retractions,
}  # fmt: skip
ORDER = ("text", "none", "retractions", "sync", "graph", "serial")  # of the picture


if __name__ == "__main__":
    main()
