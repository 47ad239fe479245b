"""Draw a tree from left to right: each node is right of its parent, and below its siblings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import svg

Node = Mapping[str, Any]


def tree(
    parts: list[str], nodes: Mapping[Any, Node], x: float, y: float, row: float, middle: float,
    gap: float, draw: Callable[[str, Node, float, float], float], *, has_root: bool = True,
) -> float:  # fmt: skip
    """Draw nodes and the lines between them from `y` down. Return the `y` below them.

    nodes: by number, each with the number of its `parent` (0: the root, which is not drawn here).
    row, gap: pixels from one row to the next, and from a node to its children.
    middle: where the lines meet a node, below its upper edge.
    draw: draws a node with its upper left corner at a place, and returns its right edge.
    has_root: whether a line goes from `x - gap` to the first node.
    """

    def below(parent: int, x: float, y: float) -> float:
        trunk, top = x - gap / 2, y + middle
        children = [(key, node) for key, node in nodes.items() if node["parent"] == parent]
        for index, (key, node) in enumerate(children):
            level = y + middle
            if index:
                parts.append(svg.line(trunk, top, trunk, level, "rule"))
            if index or parent or has_root:
                parts.append(svg.line(trunk if index else x - gap, level, x, level, "rule"))
            y = max(y + row, below(int(key), draw(key, node, x, y) + gap, y))
        return y

    return below(0, x, y)
