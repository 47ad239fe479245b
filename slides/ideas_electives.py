"""Pictures of the electives: drafts, masks, preemption, slots; and of a row with a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milestones.drawing.svg import text

from .facts import data
from .svg import WIDTH, labelled, picture

Json = dict[str, Any]
LEFT, BOX = 210.0, 42.0  # pixels


def drafts(name: str = "speculative_drafts", *numbers: str, verdict: str = "") -> str:
    """Draw some steps of a request: the tokens that a forward computes, and the model's own.

    A draft has the model's own token for its position below it.

    verdict: also draw which of the two are equal, and the tokens that the request gets.
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
            if verdict and place + 1 < len(computed):
                equal = computed[place + 1] == word
                x = LEFT + (place + 1.5) * pitch - 4
                sign = "=" if equal else "≠"
                parts.append(
                    text(x, y + 2 * BOX + 38, sign, "strong" if equal else "hot-ink", 26, "middle")
                )
            if verdict and accepted:
                parts += _word(LEFT + (place + 1) * pitch, y + 2 * BOX + 52, pitch, word, kind, ink)
        if verdict:
            parts.append(text(LEFT - 14, y + 2 * BOX + 80, "appended", "soft", 20, "end"))
            y += BOX + 52
        y += 2 * BOX + 30
    return picture(WIDTH, y - 18, parts, f"Drafts and own tokens of {name}")


def _word(x: float, y: float, pitch: float, word: str, kind: str, ink: str) -> list[str]:
    shown = word.replace("\n", "⏎").strip() or "␣"
    return labelled(x, y, pitch - 8, BOX, shown, kind, ink, 22)


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
            kind, ink = ("stall", "hot-ink") if lost else ("output", "on")
            parts += labelled(x, y, pitch - 6, BOX, shown, kind, ink, 22)
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
    steps = data(name)["steps"]

    def cell(key: str, place: int) -> Cell | None:
        step = steps[place]
        if count := step["tokens"].get(key) or step.get(key, 0):
            kind = "computed" if count > 1 else "output"
            return f"{count}", "work" if key in copies else kind, "on strong"
        living = [number for number, step in enumerate(steps) if key in step["tokens"]]
        return WAITS if living and living[0] < place < living[-1] else None

    copies = {"to_host": "to host", "from_host": "from host"}
    parts = _table(steps, {"low": "low", "urgent": "urgent"}, copies, cell)
    return picture(WIDTH, TOP + 4 * ROOM - 12, parts, f"The steps of {name}")


def pooled(name: str = "embedding_example") -> str:
    """Draw the steps of a text and of vectors: the tokens computed, and those that are pooled."""
    steps = data(name)["steps"]

    def cell(key: str, place: int) -> Cell | None:
        step = steps[place]
        if not (count := step["tokens"].get(key, 0)):
            return None
        kind = "work" if key in step["pooled"] else "computed" if count > 1 else "output"
        return f"{count}{', ends' if key in step['ended'] else ''}", kind, "on strong"

    names = {key: key for key in ("text", "MEAN", "LAST")}
    parts = _table(steps, names, {}, cell)
    return picture(WIDTH, TOP + 3 * ROOM - 12, parts, f"The steps of {name}")


def slots(name: str = "lora_example") -> str:
    """Draw the steps of requests with adapters: the slot of each, and the loads before a step."""
    run = data(name)
    steps = run["steps"]
    names = {key: f"{key}: {adapter or 'base'}" for key, adapter in run["adapters"].items()}

    def cell(request: str, place: int) -> Cell | None:
        step = steps[place]
        if (slot := step["slots"].get(request)) is None:
            return WAITS if request in step["waiting"] else None
        return f"slot {slot}", *(("output", "on strong") if slot else ("forward", "light strong"))

    parts = _table(steps, names, {"loads": "loads"}, cell)
    y, pitch = TOP + len(names) * ROOM, (WIDTH - 150) / len(steps)
    for place, step in enumerate(steps):
        for number, load in enumerate(step["loads"]):
            parts.append(text(150 + place * pitch, y + 28 + 26 * number, load, "strong"))
    return picture(WIDTH, y + 66, parts, f"The steps of {name}")


TOP, ROOM = 36, 58  # pixels: the first row of a table, and from one row to the next
Cell = tuple[str, str, str]  # a word, and the classes of its box and of its letters
WAITS: Cell = ("waits", "idle", "soft")


def _table(
    steps: list[Json], names: dict[str, str], soft: dict[str, str],
    cell: Callable[[str, int], Cell | None],
) -> list[str]:  # fmt: skip
    """Draw a column for each step, and a row for each key with its name, the soft ones last."""
    pitch, parts = (WIDTH - 150) / len(steps), [text(0, 22, "step", "soft")]
    for place in range(len(steps)):
        middle = 150 + (place + 0.5) * pitch - 3
        parts.append(text(middle, 22, f"{place + 1}", "soft", anchor="middle"))
    for row, (key, name) in enumerate((names | soft).items()):
        y = TOP + row * ROOM
        parts.append(text(0, y + 28, name, "soft" if key in soft else "strong", 22))
        for place in range(len(steps)):
            if found := cell(key, place):
                parts += _word(150 + place * pitch, y, pitch, *found)
    return parts
