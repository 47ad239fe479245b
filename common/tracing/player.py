"""Write a recorded run as one HTML file that plays it. The file loads nothing else.

The parts of the page are in `player_page/`. The server's live page draws with the same ones.

    player.html     the page: a toolbar, and the places of the other parts
    sections.html   what is drawn: time, counters, requests, pages, tree
    style.css       the style, with the colours of the project
    *.js            the scripts, in the order of `SCRIPTS`
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .data import TraceData

PARTS = Path(__file__).with_name("player_page")
SCRIPTS = (
    "recording.js", "events.js", "narration.js", "lanes.js", "counters.js", "requests.js",
    "memory.js", "playing.js",
)  # fmt: skip
TRACE = "{{TRACE}}"


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
    return template().replace(TRACE, text.replace("<", "\\u003c"))


def template() -> str:
    """Return the HTML of the player with `{{TRACE}}` in the place of the trace."""
    script = part("script") + 'load(JSON.parse($("trace").textContent));\n'
    page = part("player.html")
    return filled(page, STYLE=part("style.css"), SECTIONS=part("sections.html"), SCRIPT=script)


def part(name: str) -> str:
    """Return a part of the page; `script`: all scripts."""
    if name == "script":
        return "".join(part(script) for script in SCRIPTS)
    return (PARTS / name).read_text(encoding="utf-8")


def filled(page: str, **parts: str) -> str:
    """Return a page with the parts in the places of their names, each in `{{...}}`.

    One pass, so that a part may contain such a name.
    """
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts.get(mark[1], mark[0]), page)
