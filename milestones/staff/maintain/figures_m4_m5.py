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
from ...drawing import handout, svg, theme
from ...drawing.lanes import Span, lane
from ...drawing.tree import tree

Json = dict[str, Any]
LANES = ROOT / "slides" / "data" / "m5.json"
TIMELINES = ROOT / "milestones" / "m5_overlap" / "timelines.json"
# Of the lanes.
RULES = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace}"
    ".title{font:600 13px system-ui,sans-serif}.note{font:12px system-ui,sans-serif}"
    ".launch{fill:var(--work)}.process{fill:var(--output)}.on{fill:var(--panel)}"
    ".even{fill:var(--forward)}.odd{fill:var(--forward);fill-opacity:.4}"
    ".wait{fill:none;stroke:var(--soft);stroke-dasharray:2 2}"
)
LEFT, WIDTH = 110, 900  # pixels: of the lanes
# Of the tree: pixels of a page, its height, and from one row of nodes to the next.
CELL, BOX, ROW = 92, 40, 72
PAGE_SIZE = 2  # tokens
TREE_RULES = (
    ".n{font-weight:600}.used{fill:var(--cached);fill-opacity:.2;stroke:var(--cached);"
    "stroke-width:1.5}.idle{fill:none;stroke:var(--soft);stroke-dasharray:3 2}"
)
# A word is a token here, so that a page has whole words.
PROMPTS = {
    "A": "You are a tutor. What is a page?",
    "B": "You are a tutor. What is a tree?",
    "C": "You are a tutor. Why do pages help?",
}


def tree_picture() -> str:
    """Draw two moments of a run: a cached prompt, then two requests that begin like it."""
    config = EngineConfig(
        model="tiny-llama", device="cpu", page_size=PAGE_SIZE, num_pages=32, max_num_seqs=2, seed=0
    )
    words = list(dict.fromkeys(" ".join(PROMPTS.values()).split()))
    prompts = {name: [words.index(w) for w in text.split()] for name, text in PROMPTS.items()}
    parts: list[str] = []
    with load("m4_radix").LLMEngine(config) as engine:
        engine.generate([prompts["A"]], SamplingParams(max_tokens=1, temperature=0))
        title = "A has ended. Its prompt is cached, and no request reads it."
        bottom = _tree(engine, words, title, 54, parts)
        for name in ("B", "C"):
            params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
            engine.add_request(prompts[name], params, name)
        engine.step()
        title = "B and C run. Each has found a part of the prefix; the node was split there."
        bottom = _tree(engine, words, title, bottom + 12, parts)
    parts += [
        svg.rect(12, bottom, 22, 16, "used"),
        svg.text(42, bottom + 13, "a page that requests read: they hold locks on its node"),
        svg.rect(392, bottom, 22, 16, "idle"),
        svg.text(422, bottom + 13, "a cached page, which can be evicted"),
    ]
    title = (
        f"A page has {PAGE_SIZE} words, its number, and the letters of the requests that read it"
    )
    return handout.document(parts, 680, bottom + 30, title, TREE_RULES)


def _tree(engine: Any, words: list[str], title: str, top: float, parts: list[str]) -> float:
    """Draw the tree of an engine below a title. Return the lower edge."""
    scheduler = engine.core.scheduler
    readers = {r.request_id: scheduler.kv_cache.pages_of(r) for r in scheduler.running}

    def draw(_key: object, node: Mapping[str, Any], x: float, y: float) -> float:
        kind = "used" if node["locks"] else "idle"
        for page, tokens in zip(node["pages"], node["tokens"], strict=True):
            parts.append(svg.rect(x, y, CELL - 3, BOX, kind, rx=3))
            parts.append(svg.text(x + 7, y + 16, " ".join(words[token] for token in tokens)))
            parts.append(svg.text(x + 7, y + 33, str(page), "soft"))
            names = [name for name, pages in readers.items() if page in pages]
            for number, name in enumerate(reversed(names)):
                left = x + CELL - 22 - 18 * number
                parts.append(svg.rect(left, y + 21, 15, 15, f"request{ord(name) - 65}", rx=3))
                parts.append(svg.text(left + 7.5, y + 33, name, "chip-ink n", 11, "middle"))
            x += CELL
        locks = node["locks"]
        label = f"{locks} lock{'s' * (locks != 1)}"
        parts.append(svg.text(x - CELL * len(node["pages"]), y - 5, label, "soft", 11))
        return x

    parts.append(svg.text(12, top, title, "n"))
    return tree(parts, _nodes(engine), 34, top + 26, ROW, BOX / 2, 22, draw)


def _nodes(engine: Any) -> dict[int, Json]:
    """Return the nodes of the tree by number, parents first. A page has `PAGE_SIZE` tokens."""
    cache = engine.core.scheduler.kv_cache.radix_cache
    numbers = {node: number for number, node in enumerate([cache.root, *cache.nodes()])}
    return {
        numbers[node]: {
            "parent": numbers[node.parent], "pages": node.pages, "locks": node.lock_count,
            "tokens": [node.tokens[PAGE_SIZE * i :][:PAGE_SIZE] for i in range(len(node.pages))],
        }
        for node in cache.nodes()
    }  # fmt: skip


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
                 else ("odd", str(s.get("tokens", s["step"])), "")))
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
    title = "Lanes of the host and forwards"
    return theme.document(parts, LEFT + WIDTH + 10, y + 38, title, RULES)
