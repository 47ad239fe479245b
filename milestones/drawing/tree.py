"""Draw a tree from left to right: each node is right of its parent, and below its siblings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import svg

Node = Mapping[str, Any]


class Tree:
    """Draws nodes, given by number, each with the number of its `parent` (0: the root)."""

    def __init__(
        self,
        nodes: Mapping[Any, Node],
        row: float,
        middle: float,
        gap: float,
        draw: Callable[[str, Node, float, float], float],
    ) -> None:
        """row: pixels from one row to the next. gap: from a node to its children.

        middle: where the lines meet a node, below its upper edge.
        draw: draws a node with its upper left corner at a place, and returns its right edge.
        """
        self.nodes, self.row, self.middle, self.gap, self.draw = nodes, row, middle, gap, draw
        self.lines: list[str] = []

    def below(self, parent: int, x: float, y: float, *, is_joined: bool = True) -> float:
        """Draw the nodes below a node, from `y` down. Return the `y` below them.

        is_joined: whether the first node has a line to its parent, which ends at `x - gap`.
        """
        trunk, top = x - self.gap / 2, y + self.middle
        children = [(key, node) for key, node in self.nodes.items() if node["parent"] == parent]
        for index, (key, node) in enumerate(children):
            middle = y + self.middle
            if index:
                self.lines.append(svg.line(trunk, top, trunk, middle, "rule"))
                self.lines.append(svg.line(trunk, middle, x, middle, "rule"))
            elif is_joined:
                self.lines.append(svg.line(x - self.gap, middle, x, middle, "rule"))
            right = self.draw(key, node, x, y)
            y = max(y + self.row, self.below(int(key), right + self.gap, y))
        return y
