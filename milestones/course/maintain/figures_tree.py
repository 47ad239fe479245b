"""Draw the pictures of m4 and m5: `python -m milestones.course.maintain.figures_tree`.

    m4_radix/tree.svg     the radix tree before and after two requests find their prefixes
    m5_overlap/lanes.svg  host and forward, serial and overlapped, at the same scale

Both come from runs of a tiny model with a fixed seed. The tree is the same on every machine. The
lanes show measured times of one run, in which the forwards are emulated by sleeping.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from common import EngineConfig, SamplingParams
from common.tracing.data import Span, TraceData
from common.tracing.trace import Trace

from ... import svg

FOLDER = Path(__file__).resolve().parents[2]
# The colours of Okabe and Ito, which people with any colour vision can distinguish.
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font: 600 13px system-ui, sans-serif } .note { font: 12px system-ui, sans-serif }
.line { stroke: #59636e; fill: none; stroke-width: 1.2 } .on { fill: #ffffff }
.held { fill: #0072b2; stroke: #0072b2 }
.cached { fill: none; stroke: #59636e; stroke-dasharray: 3 2 } .ink { fill: #1f2328 }
.launch { fill: #e69f00 } .process { fill: #cc79a7 }
.wait { fill: none; stroke: #59636e; stroke-dasharray: 2 2 }
.even { fill: #0072b2 } .odd { fill: #56b4e9 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .on { fill: #ffffff } .ink { fill: #1f2328 }
  .line, .cached, .wait { stroke: #9198a1 }
}
"""
CELL, ROW = (44, 46)  # pixels: the width of a page, and from one row of nodes to the next
LEFT, WIDTH = (110, 900)  # pixels: of the lanes
NUM_STEPS = 6
WARM_UP, STEPS = 20, 60  # steps before the lanes are steady, and steps to choose from
FORWARD_MS = 10.0
NUM_REQUESTS = 16


def main() -> None:
    """Write both pictures."""
    (FOLDER / "m4_radix" / "tree.svg").write_text(tree_picture(), encoding="utf-8")
    (FOLDER / "m5_overlap" / "lanes.svg").write_text(lanes_picture(), encoding="utf-8")


def tree_picture() -> str:
    """Draw two moments of a run: a cached conversation, then two requests that begin like it."""
    config = EngineConfig(
        model="tiny-llama", device="cpu", page_size=4, num_pages=32, max_num_seqs=2, seed=0
    )
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with importlib.import_module("m4_radix").LLMEngine(config) as engine:
        engine.generate("You are a tutor. What is a page?", params)
        top = 24
        parts = [
            *_title("A has ended. Its prompt and answer are cached. No request reads them.", 16)
        ]
        drawn, bottom = _tree(engine, top)
        parts += drawn
        for name, prompt in (
            ("B", "You are a tutor. What is a tree?"),
            ("C", "You are a tutor. Why?"),
        ):
            engine.add_request(prompt, params, name)
        engine.step()
        parts += _title(
            "B and C run. They found a part of the prefix; the node was split there.", bottom + 30
        )
        drawn, bottom = _tree(engine, bottom + 38)
        parts += drawn
    parts += _note(
        "a cell is a page of 4 tokens, with its number below · filled: locked by this many · "
        "dashed: cached, can be evicted", bottom + 16,
    )  # fmt: skip
    return svg.document(parts, 800, bottom + 28, STYLE)


def _tree(engine: Any, top: int) -> tuple[list[str], int]:
    """Draw a tree, with its nodes from left to right. Return the parts and the lower edge."""
    decode = engine.loaded.tokenizer.decode
    parts: list[str] = []
    row = 0

    def draw(node: Any, x: int, y: int) -> None:
        nonlocal row
        kind = "held" if node.lock_count else "cached"
        for i, page in enumerate(node.pages):
            left = x + i * CELL
            text = "".join(_shown(decode([t])) for t in node.tokens[4 * i : 4 * i + 4])
            parts.append(svg.rect(left, y, CELL - 2, 20, kind))
            parts.append(svg.text(left + 6, y + 14, text, "on" if node.lock_count else ""))
            parts.append(svg.text(left + 6, y + 33, str(page), "note"))
        x += len(node.pages) * CELL
        if node.lock_count:
            parts.append(
                svg.text(
                    x + 2, y + 14, f"{node.lock_count} locks" if node.lock_count > 1 else "1 lock"
                )
            )
        children(node, x + 60 * bool(node.lock_count) + 4, y)

    def children(node: Any, x: int, y: int) -> None:
        nonlocal row
        for i, child in enumerate(node.children.values()):
            row += i > 0
            below = top + row * ROW
            parts.append(svg.path(f"M{x} {y + 10} V{below + 10} H{x + 16}", "line"))
            draw(child, x + 16, below)

    children(engine.scheduler.kv_cache.radix_cache.root, 8, top)
    return parts, top + (row + 1) * ROW


def _shown(text: str) -> str:
    """Return a visible character: a sign for a space, a dot for a part of a character."""
    if text == " ":
        return "␣"
    return text if len(text) == 1 and text.isascii() and text.isprintable() else "·"


def lanes_picture() -> str:
    """Draw steady decode steps of both loops, and write how long the forward lane was idle."""
    traces = {name: _traced(overlap) for name, overlap in (("serial", False), ("overlapped", True))}
    windows = {name: _steady(trace) for name, trace in traces.items()}
    longest = max(window[-1].end - window[0].start for window in windows.values())
    scale = WIDTH / (1.02 * longest)
    parts: list[str] = []
    for y, (name, trace) in zip((30, 130), traces.items(), strict=True):
        window = windows[name]
        gap = 1e3 * mean(after.start - before.end for before, after in pairwise(window))
        busy = sum(s.end - s.start for s in window) / (window[-1].end - window[0].start)
        parts += _title(f"{name}: gap {gap:.2f} ms, the forward lane is busy {busy:.1%}", y - 12)
        parts += _lane("host", y, _host_spans(trace, window), window[0].start, scale)
        forwards = [(s, "even" if s.step % 2 else "odd", str(s.step)) for s in window]
        parts += _lane("forward", y + 30, forwards, window[0].start, scale)
    parts += _legend(222)
    parts += _note(
        f"{NUM_STEPS} quiet steps of one run · {NUM_REQUESTS} decoding requests, a tiny model · "
        f"emulated forwards, at least {FORWARD_MS:g} ms each · the same scale", 248,
    )  # fmt: skip
    return svg.document(parts, LEFT + WIDTH + 10, 260, STYLE)


def _traced(overlap: bool) -> TraceData:
    config = EngineConfig(
        model="tiny-llama", device="cpu", max_num_seqs=NUM_REQUESTS, num_pages=20 * NUM_REQUESTS,
        emulated_forward_ms=FORWARD_MS, enable_overlap=overlap, seed=0,
    )  # fmt: skip
    params = SamplingParams(max_tokens=WARM_UP + STEPS + 10, temperature=0, ignore_eos=True)
    with importlib.import_module("m5_overlap").LLMEngine(config) as engine, Trace(engine) as trace:
        for i in range(NUM_REQUESTS):
            engine.add_request([i + 1, 2, 3], params)
        while engine.has_unfinished_requests():
            engine.step()
    return trace.data


def _steady(trace: TraceData) -> list[Span]:
    """Return the fastest steps in a row: other work of the machine slows some steps down."""
    forwards = trace.forwards[WARM_UP : WARM_UP + STEPS]
    windows = [forwards[i : i + NUM_STEPS] for i in range(len(forwards) - NUM_STEPS)]
    return min(windows, key=lambda window: window[-1].end - window[0].start)


def _host_spans(trace: TraceData, window: list[Span]) -> list[tuple[Span, str, str]]:
    """Return what the host did between the beginning and the end of these forwards."""
    start, end = window[0].start, window[-1].end
    spans = [s for s in trace.spans if s.name in ("launch", "process", "wait")]
    cut = [Span(s.name, max(s.start, start), min(s.end, end), s.step) for s in spans]
    return [(s, s.name, "") for s in cut if s.end > s.start]


def _lane(
    name: str, y: int, spans: list[tuple[Span, str, str]], start: float, scale: float
) -> Iterator[str]:
    yield svg.text(8, y + 14, name)
    for span, kind, label in spans:
        left, width = LEFT + (span.start - start) * scale, (span.end - span.start) * scale
        yield svg.rect(left, y, width, 20, kind)
        if label and width > 30:
            yield svg.text(left + 6, y + 14, label, "on" if kind == "even" else "ink")


def _legend(y: int) -> Iterator[str]:
    names = {
        "launch": "plan and launch", "process": "process a result", "wait": "wait",
        "even": "a forward", "odd": "the next one",
    }  # fmt: skip
    for i, (kind, name) in enumerate(names.items()):
        yield svg.rect(LEFT + 170 * i, y - 11, 16, 12, kind)
        yield svg.text(LEFT + 22 + 170 * i, y, name, "note")


def _title(text: str, y: int) -> list[str]:
    return [svg.text(8, y, text, "title")]


def _note(text: str, y: int) -> list[str]:
    return [svg.text(8, y, text, "note")]


if __name__ == "__main__":
    main()
