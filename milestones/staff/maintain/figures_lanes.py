"""Draw the pictures of m5 from recorded runs: `python -m milestones.staff.maintain.figures_lanes`.

    m5_overlap/lanes.svg      host and forward, serial and overlapped, of the run that slides show
    m5_overlap/timelines.svg  the runs of an exercise, most of them with a fault (`timelines.py`)

Their forwards are emulated: they sleep.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from ...drawing import svg

Json = dict[str, Any]
FOLDER = Path(__file__).resolve().parents[2]
LANES = FOLDER.parent / "slides" / "data" / "m5_lanes.json"
TIMELINES = FOLDER / "m5_overlap" / "timelines.json"
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


def main() -> None:
    """Write both pictures."""
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
    note = "a tiny model, 16 requests · emulated forwards of 10 ms: they sleep · {} · one scale"
    numbered = {f"timeline {n}": run for n, run in enumerate(timelines["runs"], 1)}
    by_tokens = f"a forward shows the tokens that it computes · {note}"
    return {
        "lanes.svg": draw(named, note.format(lanes["machine"])),
        "timelines.svg": draw(numbered, by_tokens.format(timelines["machine"])),
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
            (s, "even" if n % 2 else "odd", str(s.get("tokens", s["step"])))
            for n, s in enumerate(run["forward"])
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


if __name__ == "__main__":
    main()
