"""Figures of the worked examples: the tokens that each step computed, and the results."""

from __future__ import annotations

from typing import Any

from milestones.chain import at_least
from milestones.drawing.svg import text

from .facts import data
from .svg import NUMBER, WIDTH, chip, labelled, picture, rect, text_width

Json = dict[str, Any]


def forwards_of(run: Json) -> list[dict[str, int]]:
    """Return the forwards in order. Step k processes forward k. m5 launches it a step earlier."""
    return [batch for step in run["steps"] for batch in step["batches"] if batch]


def steps(name: str, first: str = "1", last: str = "", who: str = "", low: str = "") -> str:
    """Draw a column for each step and a row for each request: tokens computed, token sampled.

    `who`: draw only these requests. `low`: without sums and reasons of ends.
    """
    run = data(name)
    numbers = range(int(first), int(last or len(forwards_of(run))) + 1)
    names = [name for name in run["prompts"] if name in (who or name)]
    left, top, height = 70, 34, 72 if low else 106
    width = min(200, (WIDTH - left) / len(numbers))
    bottom = top + len(names) * height
    overlaps = at_least(run["milestone"], "m5_overlap")
    parts = [text(0, 22, "forward" if overlaps else "step", "soft", 20)]
    for column, number in enumerate(numbers):
        x = left + column * width
        batch = forwards_of(run)[number - 1]
        parts.append(text(x + width / 2, 22, str(number), "soft", 20, "middle"))
        for row, request in enumerate(names):
            y = top + row * height
            parts += _cell(run, number, request, batch, x + 3, y + 3, width - 6, bool(low))
        if not low:
            count = f"{_computed(run, batch)}"
            parts.append(text(x + width / 2, bottom + 20, count, "strong", 20, "middle"))
    parts += [chip(22, top + row * height + 27, n, NUMBER[n], 38) for row, n in enumerate(names)]
    if not low:
        parts.append(text(0, bottom + 20, "tokens", "soft", 20))
    right = left + len(numbers) * width
    return picture(right, bottom + (2 if low else 30), parts, f"The steps of {name}")


def _computed(run: Json, batch: dict[str, int]) -> int:
    padded = run["milestone"] == "m2_continuous" and batch
    return max(batch.values()) * len(batch) if padded else sum(batch.values())


def _cell(
    run: Json, number: int, who: str, batch: dict[str, int], x: float, y: float, w: float, low: bool
) -> list[str]:
    before = run["steps"][number - 2]["requests"][who] if number > 1 else {"state": "waiting"}
    after = run["steps"][number - 1]
    if who not in batch:
        if before["state"] in ("stop", "length"):
            return []
        state = after["requests"][who]["state"]
        word, kind = ("stalls", "stall") if before["state"] == "decode" else ("waits", "idle")
        if who in after["retracted"] and state == "waiting":
            word, kind = "retracted", "stall"
        return labelled(x, y, w, 44, word, kind, "soft")
    if before["state"] in ("stop", "length"):
        return labelled(x, y, w, 44, "dropped", "stall", "hot-ink")
    count = batch[who]
    kind = "output" if count == 1 and before["state"] == "decode" else "computed"
    longest = max(batch.values()) if run["milestone"] == "m2_continuous" else count
    share = w * count / longest
    parts = labelled(x, y, share, 44, str(count), kind, "on strong", 22)
    if share < w:
        parts.append(rect(x + share, y, w - share, 44, "padding"))
    return [*parts, *_said(after, who, x, y, w, low)]


def _said(after: Json, who: str, x: float, y: float, w: float, low: bool) -> list[str]:
    """Draw the sampled token below its box: "stop" if it ended the text and is no part of it."""
    state = after["requests"][who]["state"]
    said = after["said"].get(who, "")
    ended = state in ("stop", "length")
    words = said.strip() if said else ("stop" if ended else "no token")
    kind = "output-ink strong" if said else "soft"
    size = max(20.0, min(22.0, w / max(1, text_width(words, 1))))
    parts = [text(x + w / 2, y + 67, words, kind, size, "middle")]
    if ended and said and not low:
        reason = f"ends: {state}" if w > 125 else state
        parts.append(text(x + w / 2, y + 90, reason, "soft", 20, "middle"))
    return parts


def words(name: str) -> str:
    """Draw the prompts of an example, token by token."""
    run, parts, y = data(name), list[str](), 0.0
    for who, tokens in run["prompts"].items():
        parts.append(chip(18, y + 22, who, NUMBER[who], 32))
        x = 48.0
        for token in tokens:
            shown = token.strip() or "␣"
            width = text_width(shown, 20) + 18
            parts += labelled(x, y, width - 4, 42, shown, "computed", "on")
            x += width
        parts.append(text(x + 8, y + 28, f"{len(tokens)} tokens", "soft", 20))
        y += 56
    return picture(WIDTH, y, parts, "The three prompts, token by token")
