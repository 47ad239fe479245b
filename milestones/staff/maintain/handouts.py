"""Write what `exercises.toml` has into the handouts: titles, points, hours, summaries and hints.

The table of the stops is written from `DELTA.toml` and from the lines of the diff.

`python -m milestones.staff.maintain.handouts` writes them into all handouts. All other text of a
handout is written there, by hand.
"""

from __future__ import annotations

import re
import textwrap

from ...chain import ROOT, below, course_place, short
from ...course.catalog import load, taught_engines
from ...course.diff.choose import stop_of
from ...course.diff.lesson import Lesson, lesson
from ...course.diff.lesson_text import counts
from ...course.exercise import Exercise

WIDTH = 110  # columns of the generated paragraphs
HINTS = ("First", "Second", "Third")
UP_TO = r"(?s:(?!\n## ).)*?"  # any text within a section


def refreshed(handout: str, exercises: tuple[Exercise, ...], tour: Lesson | None = None) -> str:
    """Return a handout with the exercises' table, headings and hints as the catalog has them.

    tour: the lesson of the milestone. If it has stops, their table is written, too. Raises
    `ValueError` if the handout has no place for one of these parts.
    """
    if "\n## The exercises\n" in handout:
        handout = _with(handout, r"\n## The exercises\n\n(?P<old>(?:\|.*\n)*\n?)", table(exercises))
    if tour and tour.is_divided:
        head = r"\n### The stops of the diff\n\n(?:[^|\n].*\n)+\n(?P<old>(?:\|.*\n)*)"
        handout = _with(handout, head, stops(tour, exercises))
    for exercise in exercises:
        name = re.escape(exercise.id)
        head = rf"\n(?P<old>## {name}: .*\n{UP_TO})\*\*Why\."
        handout = _with(handout, head, f"{heading(exercise)}\n")
        run = rf"\n.*\*\*Run\.\*\* `python -m milestones check {name} --watch`.*\n(?:.+\n)*\n"
        handout = _with(handout, rf"{run}(?P<old>{UP_TO})\*\*Break it\.", f"{hints(exercise)}\n")
    return handout


def table(exercises: tuple[Exercise, ...]) -> str:
    """Return the table of the exercises of a milestone, with the sums in the last row."""
    lines = ["| | | points | hours | to write |", "|---|---|---|---|---|"]
    for e in exercises:
        names = ", ".join(f"`{re.split(r'[:.]', symbol)[-1]}`" for symbol in e.symbols)
        lines.append(f"| [{e.id}](#{e.anchor}) | {e.title} | {e.points} | {e.hours:g} | {names} |")
    points, hours = sum(e.points for e in exercises), sum(e.hours for e in exercises)
    return "\n".join([*lines, f"| | | {points} | {hours:g} | |", "", ""])


def stops(tour: Lesson, exercises: tuple[Exercise, ...]) -> str:
    """Return the table of the stops. The exercises of a stop have all their symbols in it."""
    lines = ["| stop | it teaches | lines | exercises | command |", "|---|---|---|---|---|"]
    command = f"python -m milestones diff {short(tour.below)} {short(tour.above)} --stop"
    for stop in tour.stops:
        mine = ", ".join(
            f"[{exercise.id}](#{exercise.anchor})"
            for exercise in exercises
            if all(stop_of(symbol, tour) is stop for symbol in exercise.symbols)
        )
        cells = (
            f"{stop.number}. {stop.title}", stop.teaches, counts(stop)[0], mine,
            f"`{command} {stop.number}`",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def tour_of(milestone: str) -> Lesson | None:
    """Return the lesson between a milestone and the one below it. The lowest one has none."""
    lower = below(milestone)
    return lesson(lower, milestone) if lower else None


def heading(exercise: Exercise) -> str:
    """Return the heading of an exercise, its points and hours, what it needs, and its summary."""
    hours = f"{exercise.hours:g} hour{'s' * (exercise.hours > 1)}"
    hours = "half an hour" if exercise.hours == 0.5 else hours
    facts = [f"{exercise.points} points", f"about {hours}"]
    if exercise.requires:
        facts.append(f"after {', '.join(exercise.requires)}")
    first = f"*{' · '.join(facts)}.* {exercise.summary}"
    return f"## {exercise.id}: {exercise.title}\n\n{_filled(first)}\n"


def hints(exercise: Exercise) -> str:
    """Return the hints of an exercise, each folded."""
    return "".join(
        f"<details><summary>{name} hint</summary>\n\n{_filled(hint)}\n\n</details>\n"
        for name, hint in zip(HINTS, exercise.hints, strict=True)
    )


def _with(handout: str, pattern: str, new: str) -> str:
    """Return a handout with the group `old` of the one match of a pattern replaced."""
    found = list(re.finditer(pattern, handout))
    if len(found) != 1:
        raise ValueError(f"a handout needs one place for {new.splitlines()[0]!r}, not {len(found)}")
    start, end = found[0].span("old")
    return handout[:start] + new + handout[end:]


def _filled(text: str) -> str:
    """Break a paragraph into lines. No line begins with an operator, which would make it a list."""
    glued = re.sub(r" (?=(?:[-+*>#]+|\d+[.)]) )", "\0", text)
    lines = textwrap.wrap(glued, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def main() -> None:
    """Write the parts into all handouts."""
    for milestone in taught_engines():
        path = ROOT / course_place(milestone) / "README.md"
        text = refreshed(path.read_text(encoding="utf-8"), load(milestone), tour_of(milestone))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
