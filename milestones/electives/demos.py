"""Parts of the demos of several electives: a table beside m5, and panels that fit a low screen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType

from common.displays.comparison import Figure, comparison, run_milestones
from common.displays.workload import Workload

from ..chain import below, package

NUM_LINES = 8  # of the table of requests, at least


class PanelsBelow:
    """The panels of m5, under a panel of the lesson. A low screen gets no lanes and a small tree.

    live: the `LivePanels` of the elective.
    num_lines: the screen lines of the lesson's panel; later, those of all panels.
    """

    def __init__(self, live: Any, console: Console, num_lines: int) -> None:
        self.live = live
        self.has_lanes = console.height >= NUM_LINES + num_lines + live.num_lines
        if not self.has_lanes:
            live.panels.tree_lines = 4
        self.num_lines = num_lines + (live if self.has_lanes else live.panels).num_lines

    def __call__(self) -> Iterable[RenderableType]:
        panels: Iterable[RenderableType] = (self.live if self.has_lanes else self.live.panels)()
        return panels


def compare(
    name: str,
    workload: Workload,
    figures: dict[str, Figure],
    console: Console,
    title: str = "all requests at once",
) -> None:
    """Serve requests on both engines, each in a process of its own, and print a table.

    name: the elective.
    """
    milestone = below(name)
    assert milestone is not None, "an elective lies on a milestone"
    results = run_milestones(dict.fromkeys((milestone, package(name)), workload), console)
    named = {engine.rpartition(".")[2]: result for engine, result in results.items()}
    console.print(comparison(title, named, figures))
