"""Draw diagrams from a few lines of text: sequences of calls, and boxes with arrows.

A sequence:

    actors: Caller, LLMEngine, Scheduler
    Caller -> LLMEngine: step()
    LLMEngine --> Caller: RequestOutput

A picture of boxes, each with its place on a grid (column, row) and its contents:

    m2_continuous/scheduler.py:Scheduler @1,0 = schedule() | waiting
    the~queue @0,0 plan = requests that wait
    the~queue -> Scheduler: popleft

A box with the name of a source is a class, and its members must exist. A class or a member is drawn
as added or changed if `DELTA.toml` of its milestone says so.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import combinations

from milestones.chain import parents
from milestones.course.delta import declared
from milestones.drawing.svg import line, polyline, text

from .sources import BuildError, definition
from .svg import SMALL, WIDTH, labelled, picture, rect, text_width

LINE = 22.0  # pixels, of a label's line
SEQUENCE = 552.0  # pixels, the height of a slide without its title


def sequence(body: str) -> str:
    """Draw calls between actors, in order.

    A label has one or two lines, between the caller's line of life and the next one.
    """
    rows = [row.strip() for row in body.splitlines() if row.strip()]
    actors = [name.strip() for name in rows[0].removeprefix("actors:").split(",")]
    gap = WIDTH / len(actors)
    place = {name: (number + 0.5) * gap for number, name in enumerate(actors)}
    calls = list[tuple[float, float, list[str], bool]]()
    for row in rows[1:]:
        found = re.fullmatch(r"(\w+) (-->|->) (\w+): (.*)", row)
        if not found or found[1] not in place or found[3] not in place:
            raise BuildError(f"sequence: cannot read {row!r}")
        start, end = place[found[1]], place[found[3]]
        lines = _wrapped(found[4], gap - (66 if start == end else 14))
        calls.append((start, end, lines, found[2] == "-->"))
    more = LINE * sum(len(lines) - 1 for *_, lines, _ in calls)
    pitch = min(50, (SEQUENCE - 70 - more) / len(calls))
    parts, y = list[str](), 70.0
    for start, end, lines, is_return in calls:
        y += LINE * (len(lines) - 1)
        parts += _call(start, end, gap, y, lines, is_return)
        y += pitch
    heads = [line(x, 44, x, y - 16, "life") for x in place.values()]
    for name, x in place.items():
        width = min(gap - 16, text_width(name, 21) + 36)
        heads += labelled(x - width / 2, 2, width, 42, name, "frame", "strong", 21, 6)
    return picture(WIDTH, y, [*heads, *parts], "Calls in order: " + "; ".join(rows[1:]))


def _wrapped(words: str, room: float) -> list[str]:
    """Return a label as one or two lines. Raises `BuildError` if it would cross a line of life."""
    parts = words.split(" ")
    for cut in (len(parts), *range(len(parts) - 1, 0, -1)):
        lines = [" ".join(part) for part in (parts[:cut], parts[cut:]) if part]
        if all(text_width(row, SMALL) <= room for row in lines):
            return lines
    raise BuildError(f"sequence: {words!r} crosses a line of life: two lines of {room:.0f} px fit")


def _call(
    start: float, end: float, gap: float, y: float, lines: list[str], is_return: bool
) -> list[str]:
    """Draw a call. `y` is the baseline of the last of its lines."""
    rows = [(y - LINE * (len(lines) - 1 - row), words) for row, words in enumerate(lines)]
    if start == end:
        side = -1 if start > 0.85 * WIDTH else 1  # There is no room on the right of the last actor.
        far, near, anchor = start + 34 * side, start + 4 * side, "end" if side < 0 else ""
        loop = polyline([(start, y - 8), (far, y - 8), (far, y + 12), (near, y + 12)], "arrow")
        return [loop, *(text(start + 44 * side, row + 9, words, "", SMALL, anchor)
                        for row, words in rows)]  # fmt: skip
    inset, middle = (4, start + gap / 2) if end > start else (-4, start - gap / 2)
    kind, ink = ("back", "soft") if is_return else ("arrow", "")
    arrow = line(start, y + 8, end - inset, y + 8, kind)
    return [arrow, *(text(middle, row, words, ink, SMALL, "middle") for row, words in rows)]


@dataclass
class Box:
    """A box on the grid, with its place and size in the picture."""

    name: str
    column: float
    row: float
    kind: str
    members: list[tuple[str, str]]  # text and class
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0


BOX = re.compile(
    r"(?P<name>\S+) @(?P<x>[\d.]+),(?P<y>[\d.]+)(?P<kind>( \w+)*)( = (?P<members>.*))?"
)


def boxes(body: str, columns: str = "4", row_height: str = "150") -> str:
    """Draw boxes on a grid, and arrows between them."""
    placed: dict[str, Box] = {}
    arrows: list[tuple[str, str, str, str]] = []
    for row in filter(None, map(str.strip, body.splitlines())):
        if found := BOX.fullmatch(row):
            box = _box(found)
            placed[box.name] = box
        elif found := re.fullmatch(r"(\S+) (-->|->) (\S+?)(?:: (.*))?", row):
            arrows.append((found[1], found[2], found[3], found[4] or ""))
        else:
            raise BuildError(f"boxes: cannot read {row!r}")
    pitch = WIDTH / float(columns)
    for box in placed.values():
        box.x, box.y = box.column * pitch, box.row * float(row_height)
        widest = max([text_width(box.name, 24), *(text_width(m, 21) for m, _ in box.members)])
        box.width = max(120, widest + 34)
        box.height = 50 + 29 * len(box.members)
    _check_apart(list(placed.values()))
    parts = [part for arrow in arrows for part in _arrow(placed, *arrow)]
    parts += [part for box in placed.values() for part in _drawn(box)]
    height = max(box.y + box.height for box in placed.values()) + 4
    return picture(WIDTH, height, parts, "Boxes: " + ", ".join(placed))


def _check_apart(placed: list[Box]) -> None:
    for a, b in combinations(placed, 2):
        across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
        if across > 0 and min(a.y + a.height, b.y + b.height) > max(a.y, b.y):
            raise BuildError(f"boxes: {a.name} and {b.name} overlap by {across:.0f} px")
    for box in placed:
        if box.x + box.width > WIDTH:
            raise BuildError(
                f"boxes: {box.name} is {box.x + box.width - WIDTH:.0f} px too far to the right"
            )


def _box(found: re.Match[str]) -> Box:
    place, members = (
        found["name"],
        [m.strip() for m in (found["members"] or "").split(" | ") if m.strip()],
    )
    if ":" not in place:
        return Box(
            place.replace("~", " "),
            float(found["x"]),
            float(found["y"]),
            found["kind"].strip() or "frame",
            [(m, "") for m in members],
        )
    name = place.rpartition(":")[2]
    status = {member: _status(f"{place}.{member.removesuffix('()')}") for member in members}
    known = _members(place)
    for member in members:
        if member.removesuffix("()") not in known:
            raise BuildError(f"{place} has no {member}")
    kind = _status(place) or ("changed" if any(status.values()) else "frame")
    return Box(name, float(found["x"]), float(found["y"]), kind, list(status.items()))


def _members(place: str) -> set[str]:
    """Return the names of the methods, properties and attributes of a class."""
    node, _ = definition(place)
    names: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            names.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            names.add(child.target.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.attr)
    return names


def _status(place: str) -> str:
    """Return "added", "changed" or "" for a symbol, as `DELTA.toml` of its milestone says."""
    milestone, _, symbol = place.partition("/")
    if parents().get(milestone) is None:  # the lowest milestone, or a file outside of the ladder
        return ""
    delta, file = declared(milestone), symbol.partition(":")[0]
    whole_class = symbol.rpartition(".")[0]
    if {symbol, file, whole_class} & delta.added:
        return "added"
    return "changed" if symbol in delta.changed else ""


def _drawn(box: Box) -> list[str]:
    parts = [
        rect(box.x, box.y, box.width, box.height, f"box {box.kind}", 8),
        text(box.x + 16, box.y + 33, box.name, "strong", 24),
    ]
    for number, (member, status) in enumerate(box.members):
        parts.append(text(box.x + 16, box.y + 64 + 29 * number, member, f"{status}-ink", 21))
    return parts


def _arrow(placed: dict[str, Box], start: str, kind: str, end: str, words: str) -> list[str]:
    try:
        a, b = placed[start.replace("~", " ")], placed[end.replace("~", " ")]
    except KeyError as missing:
        raise BuildError(f"boxes: no box is called {missing}") from None
    line_kind = "back" if kind == "-->" else "arrow"
    if abs(a.column - b.column) < 0.5:  # One box is above the other.
        x = max(a.x, b.x) + min(a.width, b.width) / 2
        down = b.y > a.y
        y1, y2 = (a.y + a.height, b.y - 5) if down else (a.y, b.y + b.height + 5)
        return [line(x, y1, x, y2, line_kind), text(x + 10, (y1 + y2) / 2 + 6, words, "soft", 20)]
    right = b.x > a.x
    x1, x2 = (a.x + a.width, b.x - 5) if right else (a.x, b.x + b.width + 5)
    y1, y2 = (min(p.y + 26, p.y + p.height / 2) for p in (a, b))
    if text_width(words, 20) > abs(x2 - x1):
        raise BuildError(f"boxes: {words!r} is wider than the gap from {a.name} to {b.name}")
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    if abs(y2 - y1) < 30:
        label = text(x, y - 9, words, "soft", 20, "middle")
    else:  # beside the line, on its right
        label = text(x + 16, y + (4 if (x2 > x1) == (y2 > y1) else 18), words, "soft", 20)
    return [line(x1, y1, x2, y2, line_kind), label]
