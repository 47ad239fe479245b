"""Write a recorded run as one HTML file that plays it. The file loads nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .data import TraceData

TEMPLATE = Path(__file__).with_name("player.html")
MARK = "{{TRACE}}"


def player_html(data: TraceData) -> str:
    """Return the HTML of the player with the trace in it."""
    return page_of(data.as_json())


def page_of(recorded: dict[str, Any]) -> str:
    """Return the HTML of the player with a trace as `TraceData.as_json` returns it.

    Texts of prompts and models must stay data, no matter what they contain. Therefore `<` is
    escaped, so that no text can end the script element that contains it. All characters outside
    ASCII are escaped too.
    """
    text = json.dumps(recorded, separators=(",", ":"), ensure_ascii=True)
    before, after = TEMPLATE.read_text(encoding="utf-8").split(MARK)
    return before + text.replace("<", "\\u003c") + after
