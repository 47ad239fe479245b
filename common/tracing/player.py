"""Write a recorded run as one HTML file that plays it. The file loads nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from .record import TraceRecord

TEMPLATE = Path(__file__).with_name("player.html")
MARK = "{{RECORD}}"


def player_html(record: TraceRecord) -> str:
    """Return the HTML of the player with the record in it.

    Texts of prompts and models must stay data, no matter what they contain. Therefore `<` is
    escaped, so that no text can end the script element that contains it. All characters outside
    ASCII are escaped too.
    """
    data = json.dumps(record.as_json(), separators=(",", ":"), ensure_ascii=True)
    before, after = TEMPLATE.read_text(encoding="utf-8").split(MARK)
    return before + data.replace("<", "\\u003c") + after
