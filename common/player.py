"""A recorded run as one HTML file that plays it. It opens from anywhere and loads nothing."""

from __future__ import annotations

import json
from pathlib import Path

from .trace_record import TraceRecord

TEMPLATE = Path(__file__).with_name("player.html")
MARK = "{{RECORD}}"


def player_html(record: TraceRecord) -> str:
    """The player with the record in it.

    Texts of prompts and models are data, whatever they hold: without `<` nothing can end the script
    element that carries them, and beyond ASCII everything is escaped.
    """
    data = json.dumps(record.as_json(), separators=(",", ":"), ensure_ascii=True)
    before, after = TEMPLATE.read_text(encoding="utf-8").split(MARK)
    return before + data.replace("<", "\\u003c") + after
