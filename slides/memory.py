"""Figures of the KV memory after a step: rows, pages, the page table, the radix tree."""

from __future__ import annotations

from typing import Any

from .facts import data
from .svg import NUMBER, WIDTH, chip, hue, line, picture, rect, text, text_width

Json = dict[str, Any]


def rows(name: str, *numbers: str) -> str:
    """Draw the slots of all rows after some steps: which are reserved, and which are written."""
    run = data(name)
    length, count = run["config"]["max_model_len"], run["config"]["max_num_seqs"]
    size, parts, y = 28.5, list[str](), 0.0
    for number in map(int, numbers):
        after = run["steps"][number - 1]
        owners = {r["row"]: (w, r) for w, r in after["requests"].items() if _runs(r)}
        used = sum(r["computed"] for _, r in owners.values())
        words_ = f"after step {number}: {used} of {len(owners) * length} reserved slots written"
        parts.append(text(0, y + 18, words_, "", 20))
        for row in range(count):
            top = y + 28 + row * 32
            parts.append(text(0, top + 20, f"row {row}", "soft", 20))
            who, request = owners.get(row, ("", {"computed": 0}))
            for slot in range(length):
                x = 98 + slot * size
                kind = "chip" if slot < request["computed"] else ("padding" if who else "idle")
                style = hue(NUMBER[who]) if kind == "chip" else ""
                parts.append(rect(x, top, size - 3, 26, kind, 3, style))
            if who:
                parts.append(chip(78, top + 13, who, NUMBER[who], 28))
        y += 44 + 32 * count
    return picture(98 + length * size, y, parts, f"Rows of the KV cache in {name}")


def _runs(request: Json) -> bool:
    return request["state"] in ("prefill", "decode") and request.get("row") is not None


def pages(name: str, *numbers: str) -> str:
    """Draw all pages after some steps, each with its owner."""
    run = data(name)
    total, parts, y, size = run["config"]["num_pages"] + 1, list[str](), 26.0, 48.0
    size = min(size, (WIDTH - 130) / total)
    parts += [text(130 + (p + 0.5) * size, 18, str(p), "soft", 20, "middle") for p in range(total)]
    for number in map(int, numbers):
        after = run["steps"][number - 1]
        held = {page for table in after["tables"].values() for page in table}
        parts.append(text(0, y + 27, f"after {number}", "", 22))
        for page in range(total):
            x, who = 130 + page * size, after["pages"].get(str(page))
            box = (x + 2, y + 2, size - 4, 36.0)
            if page == 0:
                parts += [
                    rect(*box, "padding"),
                    text(x + size / 2, y + 26, "#", "soft", 20, "middle"),
                ]
            elif who == "tree":
                kind = "locked" if page in held else "cached"
                mark = "".join(sorted(w for w, t in after["tables"].items() if page in t))
                parts += [
                    rect(*box, kind),
                    text(x + size / 2, y + 26, mark, f"{kind}-ink strong", 20, "middle"),
                ]
            elif who is None:
                parts.append(rect(*box, "idle"))
            else:
                parts += [
                    rect(*box, "chip", 4, hue(NUMBER[who])),
                    text(x + size / 2, y + 26, who, "chip-ink strong", 20, "middle"),
                ]
        y += 46
    return picture(130 + total * size, y + 4, parts, f"Pages in {name}")


def tree(name: str, number: str) -> str:
    """Draw the radix tree after a step: the text, the pages and the locks of each node."""
    run = data(name)
    nodes: dict[str, Json] = run["steps"][int(number) - 1]["nodes"]
    children: dict[int, list[str]] = {}
    for key, node in nodes.items():
        children.setdefault(node["parent"], []).append(key)
    parts: list[str] = []
    bottom = _branch(nodes, children, 0, 92, 0, parts)
    height = max(bottom, 84)
    parts.append(rect(0, 20, 64, 44, "frame", 6) + text(32, 48, "root", "soft", 20, "middle"))
    return picture(WIDTH, height, parts, f"Radix tree after step {number} of {name}")


def _branch(
    nodes: dict[str, Json],
    children: dict[int, list[str]],
    parent: int,
    x: float,
    y: float,
    parts: list[str],
) -> float:
    """Draw the nodes below a node, from `y` down. Return the `y` at which they end."""
    top = y
    for index, key in enumerate(children.get(parent, [])):
        node = nodes[key]
        size = 21.0
        width = max(176, text_width(node["text"], size) + 26)
        if index:
            parts.append(line(x - 14, top + 42, x - 14, y + 42))
        parts.append(line(x - 28 if not index else x - 14, y + 42, x, y + 42))
        kind = "locked" if node["locks"] else "cached"
        count, numbers = len(node["pages"]), " ".join(map(str, node["pages"]))
        parts += [
            rect(x, y + 6, width, 72, kind, 6),
            text(x + 12, y + 34, node["text"].strip(), f"{kind}-ink strong", size),
            text(x + 12, y + 62, f"page{'s' * (count != 1)} {numbers}", f"{kind}-ink", 20),
            text(x + width - 12, y + 62, f"locks {node['locks']}", f"{kind}-ink", 20, "end"),
        ]
        y = max(y + 92, _branch(nodes, children, int(key), x + width + 28, y, parts))
    return y
