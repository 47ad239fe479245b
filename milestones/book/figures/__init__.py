"""The figures by name. `drawn` is what the worker of a page calls."""

from __future__ import annotations

import importlib
import json

from ..figure import Figure

NAMES = (
    "triangle", "batches", "schedule", "pages", "chunks", "prefixes", "overlap", "replicas",
)  # fmt: skip


def figure(name: str) -> Figure:
    """Return a figure. Raises `ValueError` if there is none of this name."""
    if name not in NAMES:
        raise ValueError(f"there is no figure {name!r}; there are: {', '.join(NAMES)}")
    found: Figure = importlib.import_module(f".{name}", __name__).FIGURE
    return found


def drawn(name: str, values: str) -> str:
    """Return a drawing as JSON. values: of the controls, as JSON."""
    shown = figure(name).shown(json.loads(values))
    return json.dumps({"svg": shown.svg, "words": shown.words, "answer": shown.answer})
