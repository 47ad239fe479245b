"""Write what `exercises.toml` has into the handouts: titles, points, hours, summaries and hints.

`python -m milestones.staff.maintain.handouts` writes them into all handouts. All other text of a
handout is written there, by hand.
"""

from __future__ import annotations

import re
import textwrap

from ...chain import ROOT, course_place
from ...course.catalog import load, taught_engines
from ...course.exercise import Exercise

WIDTH = 110  # columns of the generated paragraphs
HINTS = ("First", "Second", "Third")
UP_TO = r"(?s:(?!\n## ).)*?"  # any text within a section


def refreshed(handout: str, exercises: tuple[Exercise, ...]) -> str:
    """Return a handout with the exercises' table, headings and hints as the catalog has them.

    Raises `ValueError` if the handout has no place for the part of an exercise.
    """
    if "\n## The exercises\n" in handout:
        handout = _with(handout, r"\n## The exercises\n\n(?P<old>(?:\|.*\n)*\n?)", table(exercises))
    for exercise in exercises:
        name = re.escape(exercise.id)
        head = rf"\n(?P<old>## {name}: .*\n{UP_TO})\*\*Why\."
        handout = _with(handout, head, f"{heading(exercise)}\n")
        run = rf"\n.*\*\*Run\.\*\* `python -m milestones check {name}`.*\n(?:.+\n)*\n"
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
        text = refreshed(path.read_text(encoding="utf-8"), load(milestone))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
