"""Record the timelines of m5's exercise: `python -m milestones.staff.maintain.timelines`.

`m5_overlap/timelines.json` has six runs of the engine. One is as it should be, and each of the
others has a fault that changes no answer. The device is emulated: forwards compute nothing. They
sleep, and so do the faults, so that other work on the machine hardly changes the lanes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.displays.demo import machine
from common.tracing.data import Span, TraceData
from common.tracing.trace import Trace

from ...chain import load
from ...recording import write

Json = dict[str, Any]
FILE = Path(__file__).resolve().parents[2] / "m5_overlap" / "timelines.json"
NUM_STEPS, WARM_UP = 5, 8
FORWARD_MS = 10.0
TOKEN_MS = 0.1  # for each token of a forward beyond one for each request
NUM_REQUESTS, PROMPT, OUTPUT = 16, 12, 40
SLOW_SECONDS = 0.014  # longer than a forward


def main() -> None:
    """Run the engine once for each fault, and write the file."""
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"))
    runs = [{"fault": name, **run(name, loaded)} for name in ORDER]
    made = {
        "machine": machine(), "forward_ms": FORWARD_MS, "token_ms": TOKEN_MS,
        "num_requests": NUM_REQUESTS, "runs": runs,
    }  # fmt: skip
    write(FILE, made)


def run(name: str, loaded: LoadedModel) -> Json:
    """Serve 16 requests with a fault. Return the lanes of a few steps, in milliseconds."""
    memory = SHORT if name == "retractions" else {"page_size": 4, "num_pages": 320}
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=NUM_REQUESTS, seed=0,
        emulated_forward_ms=FORWARD_MS, **memory,
    )  # fmt: skip
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    engine: Any = load("m5_overlap").LLMEngine(config, loaded)
    model = engine.loaded.model
    forward, model.forward = model.forward, emulated(model.config.vocab_size)
    try:
        FAULTS[name](engine)
        with engine, Trace(engine) as trace:
            for number in range(NUM_REQUESTS):
                prompt = [1 + (7 * number + place) % 250 for place in range(PROMPT)]
                engine.add_request(prompt, params)
            while engine.has_unfinished_requests():
                engine.step()
            retractions = engine.stats().num_retractions
    finally:
        model.forward = forward
    return {**lanes(trace.data, recomputes=name == "retractions"), "retractions": retractions}


def emulated(vocab_size: int) -> Callable[..., Any]:
    """Return a forward that computes nothing. It sleeps: a prompt takes longer than a decode."""

    def forward(**inputs: Any) -> Any:
        tokens = inputs["input_ids"].shape[1]
        kept = inputs["logits_to_keep"]
        rows = tokens if isinstance(kept, int) else len(kept)  # 0: all of them
        time.sleep((FORWARD_MS + TOKEN_MS * max(0, tokens - NUM_REQUESTS)) / 1000)
        return SimpleNamespace(logits=torch.zeros(1, rows, vocab_size))

    return forward


def lanes(trace: TraceData, recomputes: bool) -> Json:
    """Return the lanes of the quickest window of decode steps, each forward with its tokens.

    recomputes: the window begins with a step that computes a prompt again.
    """
    batches = chain.from_iterable(frame.batches for frame in trace.frames)
    tokens = [sum(batch.values()) for batch in batches]
    numbered = list(zip(trace.forwards, tokens, strict=False))[WARM_UP:-3]
    windows = [numbered[i : i + NUM_STEPS] for i in range(len(numbered) - NUM_STEPS)]
    if recomputes:
        windows = [w for w in windows if sum(n > NUM_REQUESTS for _, n in w) >= 2]
    window = min(windows, key=lambda window: window[-1][0].end - window[0][0].start)
    start, end = window[0][0].start, window[-1][0].end
    named = ("launch", "process", "wait")
    host = [s for s in trace.spans if s.name in named and s.end > start and s.start < end]
    busy = sum(span.end - span.start for span, _ in window) / (end - start)
    return {
        "forward": [{**row(span, start), "tokens": count} for span, count in window],
        "host": [row(span, start) for span in host],
        "busy": round(busy, 4),
    }


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
    stream = engine.core.runner.stream
    launch = stream.launch

    def one_by_one(work: Callable[[], None]) -> Any:
        all_launched = threading.Event()

        def gated() -> None:
            work()
            all_launched.wait()

        event = launch(gated)
        time.sleep(SLOW_SECONDS)
        all_launched.set()
        return event

    stream.launch = one_by_one


def slow_text(engine: Any) -> None:
    """Let the text of a step take longer than its forward, as a slow detokenizer does."""
    process = engine.process

    def slow(results: Any) -> None:
        time.sleep(SLOW_SECONDS)
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
