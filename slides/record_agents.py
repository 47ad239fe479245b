"""Record the table of `measure agents` for the slides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milestones.course.student.measure_agents import by_policy

from .record_ideas import TINY

Json = dict[str, Any]
KEYS = ("again", "hits", "p50", "p95", "tail_again", "tail_hits", "tail_ttft")


def policies(_name: str) -> Json:
    """Return a row for each policy, without host memory and with it."""
    rows = []
    for policy, *cells in by_policy("agents", TINY, (0.0, 0.5)):
        figures = [float(cell.rstrip("%")) for cell in cells]
        name = policy.replace(" + host", "_host")
        rows.append({"policy": name, **dict(zip(KEYS, figures, strict=True))})
    return {"rows": rows}


AGENTS: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "agents_policies": (("agents",), policies),
}
