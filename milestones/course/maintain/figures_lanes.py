"""Draw the pictures of m5 from recorded runs: `python -m milestones.course.maintain.figures_lanes`.

    m5_overlap/lanes.svg      host and forward, serial and overlapped, of the run that slides show
    m5_overlap/timelines.svg  four runs for an exercise; three of them have a mistake

`--record` runs the four engines again first and writes `results/timelines.json`. Their forwards are
emulated: they sleep, and compute nothing, so that a busy machine hardly changes them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch

from common import EngineConfig, SamplingParams
from common.tracing.data import Span
from common.tracing.trace import Trace

from ... import svg

Json = dict[str, Any]
FOLDER = Path(__file__).resolve().parents[2]
LANES = FOLDER.parent / "slides" / "data" / "m5_lanes.json"
TIMELINES = FOLDER / "results" / "timelines.json"
# The colours of Okabe and Ito, which people with any colour vision can distinguish.
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font: 600 13px system-ui, sans-serif } .note { font: 12px system-ui, sans-serif }
.on { fill: #ffffff } .ink { fill: #1f2328 }
.launch { fill: #e69f00 } .process { fill: #cc79a7 }
.wait { fill: none; stroke: #59636e; stroke-dasharray: 2 2 }
.even { fill: #0072b2 } .odd { fill: #56b4e9 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .wait { stroke: #9198a1 } }
"""
LEFT, WIDTH = 110, 900  # pixels: of the lanes
NUM_STEPS, WARM_UP, STEPS = 4, 12, 30
SLOW_SECONDS = 0.014  # longer than a forward


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="run the four engines again")
    if parser.parse_args().record:
        text = json.dumps(record(), indent=1)
        TIMELINES.write_text(text + "\n", encoding="utf-8")
    for name, text in pictures().items():
        (FOLDER / "m5_overlap" / name).write_text(text, encoding="utf-8")


def pictures() -> dict[str, str]:
    """Return the text of each file."""
    lanes, timelines = (json.loads(path.read_text(encoding="utf-8")) for path in (LANES, TIMELINES))
    named = {
        f"{loop}: gap {_gap(lanes[loop]):.2f} ms, the forward lane is busy "
        f"{lanes[loop]['busy']:.1%}": lanes[loop]
        for loop in ("serial", "overlapped")
    }
    numbered = {f"timeline {n}": run for n, run in enumerate(timelines["runs"], 1)}
    note = (
        "a tiny model, 16 decoding requests · emulated forwards of 10 ms: they sleep · {} · one "
        "scale"
    )
    return {
        "lanes.svg": draw(named, note.format(lanes["machine"])),
        "timelines.svg": draw(numbered, note.format(timelines["machine"])),
    }


def _gap(run: Json) -> float:
    forwards = run["forward"]
    return mean(after["start"] - before["end"] for before, after in pairwise(forwards))


def draw(runs: dict[str, Json], note: str) -> str:
    """Draw a host lane and a forward lane for each run. Times are in milliseconds."""
    scale = WIDTH / (1.02 * max(run["forward"][-1]["end"] for run in runs.values()))
    parts, y = list[str](), 30.0
    for name, run in runs.items():
        end = run["forward"][-1]["end"]
        parts.append(svg.text(8, y - 12, name, "title"))
        host = [s for s in run["host"] if s["name"] in ("launch", "process", "wait")]
        parts += _lane("host", y, [(s, s["name"], "") for s in host], end, scale)
        forwards = [
            (s, "even" if n % 2 else "odd", str(s["step"])) for n, s in enumerate(run["forward"])
        ]
        parts += _lane("forward", y + 28, forwards, end, scale)
        y += 92
    parts += _legend(y)
    parts.append(svg.text(8, y + 26, note, "note"))
    return svg.document(parts, LEFT + WIDTH + 10, y + 38, STYLE, "Lanes of the host and forwards")


def _lane(
    name: str, y: float, spans: list[tuple[Json, str, str]], end: float, scale: float
) -> Iterator[str]:
    yield svg.text(8, y + 14, name)
    for span, kind, label in spans:
        first, last = max(0.0, span["start"]), min(end, span["end"])
        left, width = LEFT + first * scale, (last - first) * scale
        yield svg.rect(left, y, width, 20, kind)
        if label and width > 30:
            yield svg.text(left + 6, y + 14, label, "on" if kind == "even" else "ink")


def _legend(y: float) -> Iterator[str]:
    names = {
        "launch": "plan and launch", "process": "process a result", "wait": "wait",
        "even": "a forward", "odd": "the next one",
    }  # fmt: skip
    for i, (kind, name) in enumerate(names.items()):
        yield svg.rect(LEFT + 170 * i, y - 11, 16, 12, kind)
        yield svg.text(LEFT + 22 + 170 * i, y, name, "note")


def record() -> Json:
    """Run the engine four times: the first, the third and the fourth with a mistake."""
    from common.displays.demo import machine

    mistakes = (slow_process, no_mistake, always_wait, hidden_wait)
    return {"machine": machine(), "runs": [_run(mistake) for mistake in mistakes]}


def _run(mistake: Callable[[Any], None]) -> Json:
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=16, num_pages=320, seed=0,
        emulated_forward_ms=10.0,
    )  # fmt: skip
    params = SamplingParams(max_tokens=WARM_UP + STEPS, temperature=0, ignore_eos=True)
    engine: Any = importlib.import_module("m5_overlap").LLMEngine(config)
    mistake(engine)
    model = engine.loaded.model
    model.forward = lambda **inputs: SimpleNamespace(
        logits=torch.zeros(1, _rows(inputs), model.config.vocab_size)
    )
    with engine, Trace(engine) as trace:
        for i in range(16):
            engine.add_request([i + 1, 2, 3], params)
        while engine.has_unfinished_requests():
            engine.step()
    forwards = trace.data.forwards[WARM_UP:-3]
    windows = [forwards[i : i + NUM_STEPS] for i in range(len(forwards) - NUM_STEPS)]
    window = min(windows, key=lambda window: window[-1].end - window[0].start)
    start, end = window[0].start, window[-1].end
    host = [s for s in trace.data.spans if s.end > start and s.start < end]
    return {
        "mistake": mistake.__name__,
        "forward": [_row(s, start) for s in window],
        "host": [_row(s, start) for s in host if s.name in ("launch", "process", "wait")],
        "busy": round(sum(s.end - s.start for s in window) / (end - start), 4),
    }


def _rows(inputs: Json) -> int:
    """Return the number of rows of logits that a forward is asked for. 0 stands for all."""
    kept = inputs["logits_to_keep"]
    return inputs["input_ids"].shape[1] if isinstance(kept, int) else len(kept)


def _row(span: Span, origin: float) -> Json:
    start, end = (round(1000 * (t - origin), 3) for t in (span.start, span.end))
    return {"name": span.name, "start": start, "end": end, "step": span.step}


def no_mistake(engine: Any) -> None:
    """Change nothing."""


def slow_process(engine: Any) -> None:
    """Let the host take longer for its results than a forward takes."""
    process = engine.process

    def slow(*args: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return process(*args)

    engine.process = slow


def always_wait(engine: Any) -> None:
    """Let the scheduler ask for the result of each step before it plans the next one."""
    engine.scheduler.needs_result = lambda: True


def hidden_wait(engine: Any) -> None:
    """Wait for the device while a step is launched, as one `.item()` does."""
    launch = engine.runner.launch

    def waiting(*args: Any) -> Any:
        result = launch(*args)
        result.done.wait()
        return result

    engine.runner.launch = waiting


if __name__ == "__main__":
    main()
