"""Pictures of drafts and the tokens that verify them, and of a row of pages with a mistake."""

from __future__ import annotations

from typing import Any

from .facts import data
from .svg import WIDTH, picture, rect, text, text_width

Json = dict[str, Any]
LEFT, BOX = 210.0, 42.0  # pixels


def drafts(name: str = "speculative_drafts", *numbers: str) -> str:
    """Draw some steps of a request: the tokens that a forward computes, and the model's own.

    A draft has the model's own token for its position below it.
    """
    run, parts, y = data(name), list[str](), 0.0
    shown = [(n, run["steps"][n - 1]) for n in map(int, numbers)]
    most = max(len(step["own"]) for _, step in shown)
    pitch = (WIDTH - LEFT) / (most + 1)
    for number, step in shown:
        computed = [step["newest"], *step["drafts"]]
        parts.append(text(0, y + 28, f"step {number}", "strong", 22))
        parts.append(text(LEFT - 14, y + 28, "computed", "soft", 20, "end"))
        parts.append(text(LEFT - 14, y + BOX + 34, "own tokens", "soft", 20, "end"))
        for place, word in enumerate(computed):
            kind, ink = ("output", "on strong") if place == 0 else ("idle", "")
            parts += _word(LEFT + place * pitch, y, pitch, word, kind, ink)
        for place, word in enumerate(step["own"]):
            # The token at `place` is the draft of the column to its right, if that draft is right.
            accepted = place < step["appended"]
            kind, ink = ("output", "on strong") if accepted else ("stall", "hot-ink")
            parts += _word(LEFT + (place + 1) * pitch, y + BOX + 6, pitch, word, kind, ink)
        y += 2 * BOX + 30
    return picture(WIDTH, y - 18, parts, f"Drafts and own tokens of {name}")


def _word(x: float, y: float, pitch: float, word: str, kind: str, ink: str) -> list[str]:
    shown = word.replace("\n", "⏎").strip() or "␣"
    size = max(20.0, min(22.0, (pitch - 16) / text_width(shown, 1)))
    return [
        rect(x, y, pitch - 8, BOX, kind),
        text(x + pitch / 2 - 4, y + 28, shown, ink, size, "middle"),
    ]


def two_rows(name: str = "m4_mistake", scene: str = "after_reset") -> str:
    """Draw the pages of a request after its first step, with the words that it writes to them: on
    the right engine, and with a mistake. A page that occurs again is written again.
    """
    run = data(name)
    size, words = run["page_size"], run["right"][scene]["prompt"]
    rows = {"right": run["right"], "the mistake": run["wrong"]}
    parts, y = list[str](), 0.0
    for title, found in rows.items():
        row = found[scene]["pages"][0]
        pitch = (WIDTH - 150) / len(row)
        parts.append(text(0, y + 28, title, "strong", 22))
        parts.append(text(0, y + 76, "page", "soft", 20))
        for place, page in enumerate(row):
            lost = page in row[place + 1 :]
            x = 150 + place * pitch
            shown = "".join(words[place * size : (place + 1) * size]).strip()
            fits = max(20.0, min(22.0, (pitch - 10) / text_width(shown, 1)))
            parts.append(rect(x, y, pitch - 6, BOX, "stall" if lost else "output"))
            ink = "hot-ink" if lost else "on"
            parts.append(text(x + pitch / 2 - 3, y + 28, shown, ink, fits, "middle"))
            strong = "hot-ink" if row.count(page) > 1 else "strong"
            parts.append(text(x + pitch / 2 - 3, y + 76, f"{page}", strong, 22, "middle"))
        y += 130
    return picture(WIDTH, 214, parts, f"The pages of a request in {name}, right and wrong")
