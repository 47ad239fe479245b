"""Draw the picture of m4: `python -m milestones.staff.maintain.figures_tree`.

`m4_radix/tree.svg` has the radix tree before and after two requests find their prefixes. It comes
from a run of a tiny model with a fixed seed, which is the same on every machine.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from common import EngineConfig, SamplingParams

from ...drawing import svg

FOLDER = Path(__file__).resolve().parents[2]
# The colours of Okabe and Ito, which people with any colour vision can distinguish.
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
.title { font: 600 13px system-ui, sans-serif } .note { font: 12px system-ui, sans-serif }
.line { stroke: #59636e; fill: none; stroke-width: 1.2 } .on { fill: #ffffff }
.held { fill: #0072b2; stroke: #0072b2 }
.cached { fill: none; stroke: #59636e; stroke-dasharray: 3 2 } .ink { fill: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .on { fill: #ffffff } .ink { fill: #1f2328 }
  .line, .cached { stroke: #9198a1 }
}
"""
CELL, ROW = (44, 46)  # pixels: the width of a page, and from one row of nodes to the next


def main() -> None:
    """Write the picture."""
    (FOLDER / "m4_radix" / "tree.svg").write_text(tree_picture(), encoding="utf-8")


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

    children(engine.core.scheduler.kv_cache.radix_cache.root, 8, top)
    return parts, top + (row + 1) * ROW


def _shown(text: str) -> str:
    """Return a visible character: a sign for a space, a dot for a part of a character."""
    if text == " ":
        return "␣"
    return text if len(text) == 1 and text.isascii() and text.isprintable() else "·"


def _title(text: str, y: int) -> list[str]:
    return [svg.text(8, y, text, "title")]


def _note(text: str, y: int) -> list[str]:
    return [svg.text(8, y, text, "note")]


if __name__ == "__main__":
    main()
