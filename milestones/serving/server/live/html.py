"""`live_html`: the live page as one file. It draws with the code of the player."""

from __future__ import annotations

import json
from pathlib import Path

from common.tracing.player import filled, part, template

HERE = Path(__file__).parent
SCRIPTS = ("chats.js", "live.js")


def live_html() -> str:
    """Return the page. It loads nothing else, and calls only the server that it came from.

    The page has the player's template in it, so that it can save a run without the server.
    """
    player = json.dumps(template(), ensure_ascii=True).replace("<", "\\u003c")
    return filled(
        (HERE / "live.html").read_text(encoding="utf-8"),
        STYLE=part("style.css") + (HERE / "live.css").read_text(encoding="utf-8"),
        SECTIONS=part("sections.html"),
        SCRIPT=part("script") + "".join((HERE / s).read_text("utf-8") for s in SCRIPTS),
        PLAYER=player,
    )
