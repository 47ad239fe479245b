"""Pictures of the electives: drafts, masks, preemption, slots; and of a row with a mistake."""

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


def masks(name: str = "structured_answer", first: str = "1", last: str = "12") -> str:
    """Draw tokens under a grammar: how many were allowed, the drawn one, and the model's own."""
    run, parts = data(name), list[str]()
    steps = run["steps"][int(first) - 1 : int(last)]
    pitch = (WIDTH - LEFT) / len(steps)
    for y, words, kind in (
        (28, "the model prefers", "soft"), (90, "drawn", "strong"), (146, "tokens allowed", "soft"),
    ):  # fmt: skip
        parts.append(text(LEFT - 14, y, words, kind, 20, "end"))
    for place, step in enumerate(steps):
        x, same = LEFT + place * pitch, step["own"] == step["token"]
        ink = "" if same else "hot-ink"
        parts += _word(x, 0, pitch, _end(step["own"]), "idle" if same else "stall", ink)
        parts += _word(x, 62, pitch, _end(step["token"]), "output", "on strong")
        count = f"{step['allowed']}"
        parts.append(text(x + pitch / 2 - 4, 146, count, "strong", 22, "middle"))
    return picture(WIDTH, 156, parts, f"Tokens under a grammar in {name}")


def _end(word: str) -> str:
    return "end" if word.startswith("<|") else word


def swaps(name: str = "priority_example") -> str:
    """Draw the steps of two requests: the tokens computed, and the pages copied to and fro."""
    run, parts = data(name), list[str]()
    pitch, top, room = (WIDTH - 150) / len(run["steps"]), 36, 58
    rows = {"low": "low", "urgent": "urgent", "to_host": "to host", "from_host": "from host"}
    for row, (key, words) in enumerate(rows.items()):
        y = top + row * room
        parts.append(text(0, y + 28, words, "strong" if row < 2 else "soft", 22))
        living = [i for i, step in enumerate(run["steps"]) if key in step["tokens"]]
        for place, step in enumerate(run["steps"]):
            x, count = 150 + place * pitch, step["tokens"].get(key) or step.get(key, 0)
            if row == 0:
                parts.append(text(x + pitch / 2 - 3, 22, f"{place + 1}", "soft", 20, "middle"))
            if count:
                kind = "computed" if count > 1 else "output"
                parts += _word(x, y, pitch, f"{count}", kind if row < 2 else "work", "on strong")
            elif living and living[0] < place < living[-1]:
                parts += _word(x, y, pitch, "waits", "idle", "soft")
    parts.append(text(0, 22, "step", "soft", 20))
    return picture(WIDTH, top + 4 * room - 12, parts, f"The steps of {name}")


def pooled(name: str = "embedding_example") -> str:
    """Draw the steps of a text and of vectors: the tokens computed, and those that are pooled."""
    run, parts = data(name), list[str]()
    pitch, top, room = (WIDTH - 150) / len(run["steps"]), 36, 58
    for row, key in enumerate(("text", "MEAN", "LAST")):
        y = top + row * room
        parts.append(text(0, y + 28, key, "strong", 22))
        for place, step in enumerate(run["steps"]):
            x, count = 150 + place * pitch, step["tokens"].get(key, 0)
            if row == 0:
                parts.append(text(x + pitch / 2 - 3, 22, f"{place + 1}", "soft", 20, "middle"))
            if count:
                kind = "work" if key in step["pooled"] else "computed" if count > 1 else "output"
                ends = ", ends" if key in step["ended"] else ""
                parts += _word(x, y, pitch, f"{count}{ends}", kind, "on strong")
    parts.append(text(0, 22, "step", "soft", 20))
    return picture(WIDTH, top + 3 * room - 12, parts, f"The steps of {name}")


def slots(name: str = "lora_example") -> str:
    """Draw the steps of requests with adapters: the slot of each, and the loads before a step."""
    run, parts = data(name), list[str]()
    pitch, top, room = (WIDTH - 150) / len(run["steps"]), 36, 58
    for row, (request, adapter) in enumerate(run["adapters"].items()):
        y = top + row * room
        parts.append(text(0, y + 28, f"{request}: {adapter or 'base'}", "strong", 22))
        for place, step in enumerate(run["steps"]):
            x, slot = 150 + place * pitch, step["slots"].get(request)
            if slot is not None:
                kind, ink = ("output", "on strong") if slot else ("forward", "light strong")
                parts += _word(x, y, pitch, f"slot {slot}", kind, ink)
            elif request in step["waiting"]:
                parts += _word(x, y, pitch, "waits", "idle", "soft")
    y = top + len(run["adapters"]) * room
    parts.append(text(0, y + 28, "loads", "soft", 22))
    for place, step in enumerate(run["steps"]):
        x = 150 + place * pitch
        parts.append(text(x + pitch / 2 - 3, 22, f"{place + 1}", "soft", 20, "middle"))
        for number, load in enumerate(step["loads"]):
            parts.append(text(x, y + 28 + 26 * number, load, "strong", 20))
    parts.append(text(0, 22, "step", "soft", 20))
    return picture(WIDTH, y + 66, parts, f"The steps of {name}")
