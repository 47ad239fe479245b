"""Draw the pictures of m4 and m5. `figures.py` writes them.

    m4_radix/tree.svg         the radix tree before and after two requests find their prefixes
    m5_overlap/lanes.svg      host and forward, serial and overlapped, of the run that slides show
    m5_overlap/timelines.svg  the runs of an exercise, most of them with a fault (`timelines.py`)

The tree is of a run of a tiny model with a fixed seed, which is the same on every machine. The
lanes are of recorded runs in virtual time, which are the same everywhere, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from statistics import mean
from typing import Any

from common import EngineConfig, SamplingParams

from ...chain import ROOT, load
from ...drawing import svg
from ...drawing.lanes import Span, lane
from ...drawing.tree import tree

Json = dict[str, Any]
LANES = ROOT / "slides" / "data" / "m5.json"
TIMELINES = ROOT / "milestones" / "m5_overlap" / "timelines.json"
# The colours of Okabe and Ito, which people with any colour vision can distinguish.
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font: 600 13px system-ui, sans-serif } .note { font: 12px system-ui, sans-serif }
.rule { stroke: #59636e; stroke-width: 1.2 } .on { fill: #ffffff } .ink { fill: #1f2328 }
.locked { fill: #0072b2; stroke: #0072b2 }
.cached { fill: none; stroke: #59636e; stroke-dasharray: 3 2 }
.launch { fill: #e69f00 } .process { fill: #cc79a7 } .even { fill: #0072b2 } .odd { fill: #56b4e9 }
.wait { fill: none; stroke: #59636e; stroke-dasharray: 2 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .rule, .cached, .wait { stroke: #9198a1 }
}
"""
CELL, ROW, PAGE_SIZE = 44, 46, 4  # pixels of a page, and to the next row of nodes; tokens of a page
LEFT, WIDTH = 110, 900  # pixels: of the lanes


def tree_picture() -> str:
    """Draw two moments of a run: a cached conversation, then two requests that begin like it."""
    config = EngineConfig(
        model="tiny-llama", device="cpu", page_size=PAGE_SIZE, num_pages=32, max_num_seqs=2, seed=0
    )
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    parts: list[str] = []
    with load("m4_radix").LLMEngine(config) as engine:
        engine.generate("You are a tutor. What is a page?", params)
        words = "A has ended. Its prompt and answer are cached. No request reads them."
        bottom = _tree(engine, words, 16, parts)
        engine.add_request("You are a tutor. What is a tree?", params, "B")
        engine.add_request("You are a tutor. Why?", params, "C")
        engine.step()
        words = "B and C run. They found a part of the prefix; the node was split there."
        bottom = _tree(engine, words, bottom + 30, parts)
    note = (
        f"a cell is a page of {PAGE_SIZE} tokens, with its number below · filled: locked by this "
        "many · dashed: cached, can be evicted"
    )
    parts.append(svg.text(8, bottom + 16, note, "note"))
    return svg.document(parts, 800, bottom + 28, STYLE)


def _tree(engine: Any, title: str, top: float, parts: list[str]) -> float:
    """Draw the tree of an engine below a title. Return the lower edge."""

    def draw(_key: object, node: Mapping[str, Any], x: float, y: float) -> float:
        locks, kind = node["locks"], "locked" if node["locks"] else "cached"
        for page, words in zip(node["pages"], node["words"], strict=True):
            parts.append(svg.rect(x, y, CELL - 2, 20, kind))
            parts.append(svg.text(x + 6, y + 14, words, "on" if locks else ""))
            parts.append(svg.text(x + 6, y + 33, str(page), "note"))
            x += CELL
        if locks:
            parts.append(svg.text(x + 2, y + 14, f"{locks} lock{'s' * (locks > 1)}"))
        return x + 60 * bool(locks)

    parts.append(svg.text(8, top, title, "title"))
    return tree(parts, _nodes(engine), 28, top + 8, ROW, 10, 20, draw)


def _nodes(engine: Any) -> dict[int, Json]:
    """Return the nodes of the tree by number, parents first."""
    decode, cache = engine.loaded.tokenizer.decode, engine.core.scheduler.kv_cache.radix_cache
    numbers = {node: number for number, node in enumerate([cache.root, *cache.nodes()])}
    found = {}
    for node in cache.nodes():
        letters = "".join(_shown(decode([token])) for token in node.tokens)
        words = [letters[i : i + PAGE_SIZE] for i in range(0, len(letters), PAGE_SIZE)]
        found[numbers[node]] = {"parent": numbers[node.parent], "pages": node.pages,
                                "words": words, "locks": node.lock_count}  # fmt: skip
    return found


def _shown(text: str) -> str:
    """Return a visible character: a sign for a space, a dot for a part of a character."""
    if text == " ":
        return "␣"
    return text if len(text) == 1 and text.isascii() and text.isprintable() else "·"


def pictures() -> dict[str, str]:
    """Draw all pictures. Returns them by path below `milestones/`."""
    recorded, timelines = (
        json.loads(path.read_text(encoding="utf-8")) for path in (LANES, TIMELINES)
    )
    lanes = recorded["m5_lanes"]
    named = {
        f"{loop}: gap {_gap(lanes[loop]):.2f} ms, the forward lane is busy "
        f"{lanes[loop]['busy']:.1%}": lanes[loop]
        for loop in ("serial", "overlapped")
    }
    note = "16 requests in virtual time · {} · one scale"
    numbered = {f"timeline {n}": run for n, run in enumerate(timelines["runs"], 1)}
    by_tokens = f"a forward shows the tokens that it computes · {note}"
    return {
        "m4_radix/tree.svg": tree_picture(),
        "m5_overlap/lanes.svg": lanes_picture(named, note.format(lanes["serial"]["costs"])),
        "m5_overlap/timelines.svg": lanes_picture(numbered, by_tokens.format(timelines["costs"])),
    }


def _gap(run: Json) -> float:
    forwards = run["forward"]
    return mean(after["start"] - before["end"] for before, after in pairwise(forwards))


def lanes_picture(runs: dict[str, Json], note: str) -> str:
    """Draw a host lane and a forward lane for each run. Times are in milliseconds."""
    scale = WIDTH / (1.02 * max(run["forward"][-1]["end"] for run in runs.values()))
    parts, y = list[str](), 30.0
    for name, run in runs.items():
        end = run["forward"][-1]["end"]
        host = [
            Span(max(0.0, s["start"]), min(end, s["end"]), s["name"])
            for s in run["host"]
            if s["name"] in ("launch", "process", "wait")
        ]
        forwards = [
            Span(s["start"], s["end"], *(("even", str(s.get("tokens", s["step"])), "on") if n % 2
                 else ("odd", str(s.get("tokens", s["step"])), "ink")))
            for n, s in enumerate(run["forward"])
        ]  # fmt: skip
        parts += [svg.text(8, y - 12, name, "title"), svg.text(8, y + 14, "host"),
                  *lane(LEFT, y, 20, scale, host), svg.text(8, y + 42, "forward"),
                  *lane(LEFT, y + 28, 20, scale, forwards)]  # fmt: skip
        y += 92
    names = {
        "launch": "plan and launch", "process": "process a result", "wait": "wait",
        "even": "a forward", "odd": "the next one",
    }  # fmt: skip
    for i, (kind, name) in enumerate(names.items()):
        parts.append(svg.rect(LEFT + 170 * i, y - 11, 16, 12, kind))
        parts.append(svg.text(LEFT + 22 + 170 * i, y, name, "note"))
    parts.append(svg.text(8, y + 26, note, "note"))
    return svg.document(parts, LEFT + WIDTH + 10, y + 38, STYLE, "Lanes of the host and forwards")
