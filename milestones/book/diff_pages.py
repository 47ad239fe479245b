"""Pages of the lessons between two milestones: one for each stop, with changes and reasons."""

from __future__ import annotations

import posixpath
import re
from functools import cache, partial

from ..chain import ROOT, below, find_engine, milestones, short
from ..course.diff.lesson import Lesson, Stop, lesson
from ..course.diff.lesson_html import Body, style
from ..course.diff.lesson_text import counts
from .staging import PAGES, Staging

FOLDER = "diffs"
BLOCKS = re.compile(r"^ *:root \{\n(.*?)^ *\}", re.MULTILINE | re.DOTALL)  # of colours


@cache
def tours() -> dict[str, Lesson]:
    """Return the lesson of each milestone that has another one below it."""
    pairs = [(below(upper), upper) for upper in milestones()]
    return {upper: lesson(lower, upper) for lower, upper in pairs if lower is not None}


def lay_out(staging: Staging) -> None:
    """Write the pages of all stops."""
    for upper, tour in tours().items():
        body = Body(tour, numbers_of(tour), partial(address, staging), ROOT)
        for stop in tour.stops:
            entries = "".join(map(body.entry, stop.entries))
            made = f'<div class="lesson">{entries}</div>'
            staging.write(page_of(upper, stop.number), page_text(staging, tour, stop, made))


def page_of(milestone: str, number: int) -> str:
    """Return the path of a stop's page in the sources of the site."""
    return f"{FOLDER}/{short(milestone)}_{number}.md"


def page_text(staging: Staging, tour: Lesson, stop: Stop, made: str) -> str:
    """Return the text of a stop's page."""
    lower, upper = short(tour.below), short(tour.above)
    lines, _ = counts(stop)
    command = f"python -m milestones diff {lower} {upper} --stop {stop.number}"
    return (
        f"---\nnosearch: true\n---\n\n# {lower} to {upper}, stop {stop.number}: {stop.title}\n\n"
        f"{stop.teaches} Lines {lines}. In a terminal: `{command}`. "
        f"[The chapter](../{upper}.md#the-difference) has the idea.\n\n{staging.html(made)}"
    )


def numbers_of(tour: Lesson) -> dict[str, int]:
    """Return the numbers of the entries, which begin anew in each stop."""
    return {e.name: n for stop in tour.stops for n, e in enumerate(stop.entries, start=1)}


def listed(name: str) -> str:
    """Return the stops of a milestone as a table, with links for a page at the top."""
    milestone = find_engine(name)
    rows = ["| stop | it teaches | lines |", "|---|---|---|"]
    for stop in tours()[milestone].stops:
        link = f"[{stop.number}. {stop.title}]({page_of(milestone, stop.number)})"
        rows.append(f"| {link} | {stop.teaches} | {counts(stop)[0]} |")
    return "\n".join(rows)


def address(staging: Staging, target: str) -> str | None:
    """Return the address of a target, as a page of a stop names it. None: the site lacks it."""
    path, mark, place = target.partition("#")
    if path in PAGES:
        found = f"{posixpath.splitext(path)[0]}.html"
    elif path in staging.code:
        found = f"code/{path}.html"
    elif path in staging.built:
        found = path
    else:
        return None
    return f"../{found}{mark}{place}"


def lesson_css() -> str:
    """Return the style of the code, for an element `lesson`, in light and dark pages."""
    light, dark = BLOCKS.findall(style("lesson.css"))
    system = f"@media(prefers-color-scheme:dark){{body:not([data-theme=light]) .lesson{{{dark}}}}}"
    chosen = f"body[data-theme=dark] .lesson{{{dark}}}"
    rules = f".lesson{{{style('lesson_code.css')}}}"
    return "\n".join([f".lesson{{{light}}}", chosen, system, rules])
