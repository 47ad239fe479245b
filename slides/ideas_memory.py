"""The central pictures of memory: rows and pages, the translation of positions, a split node."""

from __future__ import annotations

from typing import Any

from .facts import data
from .svg import NUMBER, WIDTH, chip, hue, line, path, picture, rect, text, text_width

Json = dict[str, Any]
SMALL = 20.0  # no text of a slide is smaller


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
            kind = "chip" if position < computed else "padding"
            parts.append(rect(slot, 34, w - 3, 44, kind, 4, hue(NUMBER[who])))
            parts.append(text(slot + w / 2 - 1, 26, f"{position}", "soft", SMALL, "middle"))
            if position < computed:
                word = tokens[position].strip()
                fits = max(SMALL, min(22.0, (w - 4) / text_width(word, 1)))
                parts.append(text(slot + w / 2 - 1, 63, word, "chip-ink", fits, "middle"))
        middle = x + wide / 2 - 5
        parts.append(text(middle, 112, f"page {page}", "strong", 22, "middle"))
        points = [(middle, 128), (middle, 150), (target, bottom - 34), (target, bottom - 4)]
        parts.append(path([(a, float(b)) for a, b in points], "arrow"))
    for page in range(total):
        x, owner = page * place, after["pages"].get(str(page))
        kind = "padding" if page == 0 else "idle" if owner is None else "chip"
        style = hue(NUMBER[owner]) if kind == "chip" and owner else ""
        parts.append(rect(x + 2, bottom, place - 4, 52, kind, 4, style))
        if kind == "chip":
            parts.append(text(x + place / 2, bottom + 33, owner, "chip-ink strong", 22, "middle"))
        parts.append(text(x + place / 2, bottom + 78, f"{page}", "soft", SMALL, "middle"))
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
    """Draw a tree of which two requests share a node, and both rows of the page table."""
    run = data(name)
    parts = list[str]()
    y = _tree(run["frames"][-1]["nodes"], 30, 0, parts, 26) + 10
    tables: dict[str, list[int]] = run["tables"]
    common = set.intersection(*(set(table) for table in tables.values()))
    for who, table in tables.items():
        parts.append(chip(20, y + 26, who, NUMBER[who], 40))
        for number, page in enumerate(table):
            kind = "locked" if page in common else "chip"
            x = 60 + 80 * number
            parts.append(rect(x, y, 74, 52, kind, 4, hue(NUMBER[who])))
            parts.append(text(x + 37, y + 34, str(page), f"{kind}-ink strong", 24, "middle"))
        y += 66
    return picture(WIDTH, y, parts, "Two requests share pages: the tree, and the page table")


def _common_pages(before: dict[str, Json], matched: dict[str, Json]) -> int:
    """Return how many pages of the node before are in the new upper node."""
    (upper,) = (node for key, node in matched.items() if key not in before)
    return len(upper["pages"])


def _tree(
    nodes: dict[str, Json], y: float, marked: int, parts: list[str], left: float = 330
) -> float:
    """Draw the nodes as runs of pages. Return the `y` below them."""

    def branch(parent: int, x: float, top: float) -> float:
        for index, (key, node) in enumerate(
            (key, node) for key, node in nodes.items() if node["parent"] == parent
        ):
            if index:
                parts.append(line(x - 14, top - 54, x - 14, top + 26, "rule"))
                parts.append(line(x - 14, top + 26, x, top + 26, "rule"))
            elif parent:
                parts.append(line(x - 28, top + 26, x, top + 26, "rule"))
            end = _node(key, node, x, top, marked, parts)
            top = max(top + 77, branch(int(key), end + 28, top))
        return top

    return branch(0, left, y)


def _node(key: str, node: Json, x: float, y: float, marked: int, parts: list[str]) -> float:
    """Draw one node: its pages with their words, its number and its locks."""
    wide = 119.0
    for number, (page, words) in enumerate(zip(node["pages"], node["words"], strict=True)):
        left = x + number * wide
        kind = "box plan" if number < marked else "box"
        parts.append(rect(left, y, wide - 3, 52, kind, 4))
        parts.append(text(left + wide / 2, y + 22, words.strip(), "", SMALL, "middle"))
        parts.append(text(left + wide / 2, y + 45, f"{page}", "soft", SMALL, "middle"))
    end = x + wide * len(node["pages"])
    locks = f"node {key}, locks {node['locks']}"
    parts.append(text(end - 4, y - 6, locks, "hot-ink", SMALL, "end"))
    return end
