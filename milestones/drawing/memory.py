"""A picture of the KV memory over time: which request holds which row or page."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from . import handout, svg

LEFT, TOP = 62, 76  # pixels: the corner of a picture's field
FIELD = 640  # pixels: the most that all steps take
LETTER = 12  # pixels: a narrower bar has no letter
RULES = (
    ".follow{fill:none;stroke:var(--ink);stroke-width:1.4}.n{font-weight:600}"
    ".free{fill:none;stroke:var(--line)}.arrow{fill:none;stroke:var(--ink);stroke-width:1.4}"
)

# A row or page: the request that holds it, and how many of its slots are written.
Held = dict[int, tuple[str, int]]


class Moment(NamedTuple):
    """A step after its forward: the memory, and the contexts of the requests that decode."""

    held: Held
    contexts: list[int]
    num_retractions: int  # so far


class Stay(NamedTuple):
    """A row or page that one request holds from step `start` on, with its used slots per step."""

    place: int
    name: str
    start: int
    written: list[int]


def stays(moments: list[Held]) -> list[Stay]:
    """Return which request held which row or page, from when and for how long."""
    found: list[Stay] = []
    current: dict[int, Stay] = {}
    for step, held in enumerate(moments):
        for place, (name, written) in held.items():
            stay = current.get(place)
            if stay is None or stay.name != name or stay.start + len(stay.written) != step:
                stay = current[place] = Stay(place, name, step, [])
                found.append(stay)
            stay.written.append(written)
    return found


def kind(name: str) -> str:
    """Return the class of a request's colour, which it also has in the player."""
    return f"request{ord(name) - ord('A')}"


def retracted(moments: list[Moment]) -> dict[int, str]:
    """Return the requests that lost their memory, by the number of the step before."""
    names = [{name for name, _ in moment.held.values()} for moment in moments]
    return {
        step: name
        for step, (before, after) in enumerate(pairwise(names), start=1)
        if moments[step].num_retractions > moments[step - 1].num_retractions
        for name in before - after
        if name in set().union(*names[step:])
    }


def memory_svg(
    title: str, unit: str, moments: list[Moment], places: list[int], size: int, height: int
) -> str:
    """Draw rows or pages of `size` slots over time: held slots pale, written slots solid."""
    width = FIELD // len(moments)
    end, bottom = LEFT + width * len(moments), TOP + height * len(places)
    index, followed = {place: i for i, place in enumerate(places)}, retracted(moments)
    parts: list[str] = []
    for place, i in index.items():
        y = TOP + i * height
        parts.append(svg.line(LEFT, y + height - 1, end, y + height - 1))
        parts.append(svg.text(LEFT - 6, y + height / 2 + 4, f"{unit} {place}", anchor="end"))
    for stay in stays([moment.held for moment in moments]):
        x, y = LEFT + stay.start * width, TOP + index[stay.place] * height
        long, high = width * len(stay.written), height - 2
        parts.append(svg.rect(x, y, long, high, f"{kind(stay.name)} pale"))
        heights = [high * written / size for written in stay.written]
        parts.append(handout.staircase(x, y + high, width, heights, kind(stay.name)))
        if stay.name in followed.values():
            parts.append(svg.rect(x + 0.7, y + 0.7, long - 1.4, high - 1.4, "follow"))
        if long >= LETTER:
            parts.append(svg.text(x + 3, y + high - 3, stay.name, "chip-ink n"))
    for step, name in followed.items():
        x = LEFT + step * width
        parts.append(svg.line(x, TOP - 6, x, bottom, "m"))
        parts.append(svg.text(x, TOP - 10, f"{name} is retracted", anchor="middle"))
    parts += handout.axis(LEFT, bottom + 4, width, len(moments), every=10)
    parts += handout.legend(12, 44, [
        (kind("A"), "written"), (f"{kind('A')} pale", "held, but not written"),
        *(("follow", f"request {name}") for name in dict.fromkeys(followed.values())),
    ])  # fmt: skip
    return handout.document(parts, end + 20, bottom + 44, title, RULES)
