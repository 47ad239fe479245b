"""Figures of the KV memory: rows, pages, the page table, positions in pages, the radix tree."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from milestones.drawing.svg import line, polyline, text
from milestones.drawing.tree import tree

from .facts import data
from .svg import NUMBER, WIDTH, chip, hue, labelled, picture, rect, text_width

Json = dict[str, Any]
PAGE = 119.0  # pixels, of a page of a tree with its words


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
                parts += labelled(*box, "#", "padding", "soft")
            elif who == "tree":
                kind = "locked" if page in held else "cached"
                mark = "".join(sorted(w for w, t in after["tables"].items() if page in t))
                parts += labelled(*box, mark, kind, f"{kind}-ink strong")
            elif who is None:
                parts.append(rect(*box, "idle"))
            else:
                parts += labelled(*box, who, "chip", "chip-ink strong", style=hue(NUMBER[who]))
        y += 46
    return picture(130 + total * size, y + 4, parts, f"Pages in {name}")


def nodes(name: str, number: str) -> str:
    """Draw the radix tree after a step: the text, the pages and the locks of each node."""
    parts = labelled(0, 20, 64, 44, "root", "frame", "soft", radius=6)

    def draw(_key: str, node: Mapping[str, Any], x: float, y: float) -> float:
        size, kind = 21.0, "locked" if node["locks"] else "cached"
        width = max(176, text_width(node["text"], size) + 26)
        count, numbers = len(node["pages"]), " ".join(map(str, node["pages"]))
        parts.extend([
            rect(x, y + 6, width, 72, kind, 6),
            text(x + 12, y + 34, node["text"].strip(), f"{kind}-ink strong", size),
            text(x + 12, y + 62, f"page{'s' * (count != 1)} {numbers}", f"{kind}-ink"),
            text(x + width - 12, y + 62, f"locks {node['locks']}", f"{kind}-ink", 20, "end"),
        ])  # fmt: skip
        return x + width

    nodes = data(name)["steps"][int(number) - 1]["nodes"]
    height = max(tree(parts, nodes, 92, 0, 92, 42, 28, draw), 84)
    return picture(WIDTH, height, parts, f"Radix tree after step {number} of {name}")


def same_memory(name: str = "m3_map") -> str:
    """Draw the same KV memory after the same step: as rows of m2, and as pages of m3."""
    run = data(name)
    rows, length = run["rows"]["max_num_seqs"], run["rows"]["max_model_len"]
    size, width = run["pages"]["page_size"], WIDTH / run["rows"]["max_model_len"]
    m2, m3 = run["m2_continuous"], run["m3_paged"]
    written = [sum(r["computed"] for r in held.values()) for held in (m2, m3)]
    parts = [
        text(0, 24, f"m2: {len(m2)} requests, each with a row of {length} slots", "strong", 24),
        text(WIDTH, 24, f"{written[0]} slots written", "", 22, "end"),
    ]
    for who, request in m2.items():
        top = 38 + request["row"] * 40
        parts.append(rect(0, top, WIDTH, 34, "padding", 3))
        written_width = request["computed"] * width
        parts.append(rect(0, top, written_width, 34, "chip", 3, hue(int(who))))
    second = 38 + rows * 40 + 24
    parts += [
        text(0, second + 24, f"m3: {len(m3)} requests, pages of {size} slots", "strong", 24),
        text(WIDTH, second + 24, f"{written[1]} slots written", "", 22, "end"),
    ]
    across = length // size
    owners = {page: int(who) for who, r in m3.items() for page in r["pages"]}
    for page in range(1, run["pages"]["num_pages"] + 1):
        row, column = divmod(page - 1, across)
        box = (column * size * width, second + 38 + row * 40, size * width - 1.5, 34.0)
        if page in owners:
            parts.append(rect(*box, "chip", 2, hue(owners[page])))
        else:
            parts.append(rect(*box, "idle", 2))
    label = f"The same memory in step {run['step']}: rows of m2, and pages of m3"
    return picture(WIDTH, second + 38 + rows * 40, parts, label)


def translation(name: str, number: str, who: str) -> str:
    """Draw the pages of a request in order of position, and arrows to their places in memory."""
    run = data(name)
    after, size = run["steps"][int(number) - 1], run["config"]["page_size"]
    table, computed = after["tables"][who], after["requests"][who]["computed"]
    said = "".join(step["said"].get(who, "") for step in run["steps"][: int(number)])
    tokens = [*run["prompts"][who], *(" " + w for w in said.replace(",", " ,").split())]
    total = run["config"]["num_pages"] + 1
    place, wide = WIDTH / total, min(170.0, (WIDTH - 60) / len(table))
    parts, bottom = [chip(20, 60, who, NUMBER[who], 40)], 300.0
    for index, page in enumerate(table):
        x, target = 60 + index * wide, (page + 0.5) * place
        parts.append(rect(x, 0, wide - 10, 128, "frame", 8))
        for offset in range(size):
            position = index * size + offset
            slot, w = x + 6 + offset * (wide - 22) / size, (wide - 22) / size
            kind, word = ("chip", tokens[position]) if position < computed else ("padding", "")
            box, style = (slot, 34.0, w - 3, 44.0), hue(NUMBER[who])
            parts += labelled(*box, word.strip(), kind, "chip-ink", 22, style=style)
            parts.append(text(slot + w / 2 - 1, 26, f"{position}", "soft", anchor="middle"))
        middle = x + wide / 2 - 5
        parts.append(text(middle, 112, f"page {page}", "strong", 22, "middle"))
        places = [(middle, 128), (middle, 150), (target, bottom - 34), (target, bottom - 4)]
        parts.append(polyline(places, "arrow"))
    for page in range(total):
        x, owner = page * place, after["pages"].get(str(page))
        kind = "padding" if page == 0 else "idle" if owner is None else "chip"
        style = hue(NUMBER[owner]) if kind == "chip" and owner else ""
        box, word = (x + 2, bottom, place - 4, 52.0), owner if kind == "chip" else ""
        parts += labelled(*box, word or "", kind, "chip-ink strong", 22, style=style)
        parts.append(text(x + place / 2, bottom + 78, f"{page}", "soft", anchor="middle"))
    return picture(WIDTH, bottom + 84, parts, f"From the positions of {who} to pages")


def split(name: str = "m4_split") -> str:
    """Draw a tree in five frames: before a match, the match, the split, the lock, the new leaf."""
    run = data(name)
    first, second = run["prompts"]
    before, matched, locked, inserted = (frame["nodes"] for frame in run["frames"])
    parts, y = list[str](), 0.0
    for number, (words, nodes, marked) in enumerate((
        (f"{first} runs", before, 0),
        (f"{second}: the first pages match", before, _common_pages(before, matched)),
        ("split between two pages", matched, 0), (f"{second} locks its prefix", locked, 0),
        (f"{second}'s pages: a new leaf", inserted, 0),
    ), 1):  # fmt: skip
        parts.append(text(0, y + 57, f"{number}", "strong forward-ink", 26))
        parts.append(text(28, y + 57, words, "", 22))
        y = _tree(nodes, y + 24, marked, parts)
    return picture(WIDTH, y - 8, parts, "A node of a radix tree is split, in five frames")


def shared(name: str = "m4_split") -> str:
    """Draw a tree of which two requests share a node, between their rows of the page table.

    A page of a row stands above or below the same page of the tree, and a line joins them.
    """
    run = data(name)
    drawn, places = list[str](), dict[int, tuple[float, float]]()

    def draw(key: str, node: Mapping[str, Any], x: float, y: float) -> float:
        for number, page in enumerate(node["pages"]):
            places[page] = (x + number * PAGE, y)
        return _node(0, drawn, key, node, x, y)

    bottom = tree(drawn, run["frames"][-1]["nodes"], 132, 116, 92, 26, 28, draw, has_root=False)
    tables: dict[str, list[int]] = run["tables"]
    parts = [text(0, 149, "the tree", "", 22)]
    for (who, table), top in zip(tables.items(), (0.0, bottom + 24), strict=True):
        parts.append(chip(20, top + 26, who, NUMBER[who], 40))
        parts.append(text(50, top + 33, "row", "", 22))
        x = 132.0
        for page in table:
            if page in places:  # the line is beside the words of a node
                x, y = places[page]
                start, end = (top + 52, y) if top < y else (top, y + 52)
                parts.append(line(x + 22, start, x + 22, end, "share", style=hue(NUMBER[who])))
            box, style = (x, top, PAGE - 3, 52.0), hue(NUMBER[who])
            parts += labelled(*box, str(page), "chip", "chip-ink strong", 24, style=style)
            x += PAGE
    label = "Two requests share pages: the tree, and the page table"
    return picture(WIDTH, bottom + 78, [*parts, *drawn], label)


def _common_pages(before: dict[str, Json], matched: dict[str, Json]) -> int:
    """Return how many pages of the node before are in the new upper node."""
    (upper,) = (node for key, node in matched.items() if key not in before)
    return len(upper["pages"])


def _tree(
    nodes: dict[str, Json], y: float, marked: int, parts: list[str], left: float = 330
) -> float:
    """Draw the nodes as runs of pages. Return the `y` below them."""
    draw = partial(_node, marked, parts)
    return tree(parts, nodes, left, y, 77, 26, 28, draw, has_root=False)


def _node(
    marked: int, parts: list[str], key: str, node: Mapping[str, Any], x: float, y: float
) -> float:
    """Draw one node: its pages with words, its number and its locks. Return its right edge."""
    for number, (page, words) in enumerate(zip(node["pages"], node["words"], strict=True)):
        left = x + number * PAGE
        kind = "box plan" if number < marked else "box"
        parts.append(rect(left, y, PAGE - 3, 52, kind, 4))
        parts.append(text(left + PAGE / 2, y + 22, words.strip(), "", anchor="middle"))
        parts.append(text(left + PAGE / 2, y + 45, f"{page}", "soft", anchor="middle"))
    end = x + PAGE * len(node["pages"])
    locks = f"node {key}, locks {node['locks']}"
    parts.append(text(end - 4, y - 6, locks, "strong halo", anchor="end"))
    return end
