"""Write a lesson as one HTML file that loads nothing else and can be read without its script.

The code is coloured here and not in the browser. On a wide screen the two milestones stand side by
side, and notes stand beside the code of a new file. On a narrow one, all is in one column, with the
same elements and another layout in `lesson.css`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from urllib.parse import quote

from .. import delta
from .code_html import segments
from .lesson import Entry, Lesson, Stop
from .lesson_text import counts
from .parts import Part
from .pointers import Pointer, pointers

HERE = Path(__file__).resolve().parent
Numbers = dict[str, int]  # name of an entry -> its number in the tour
Address = Callable[[str], str | None]  # of a path from the root, perhaps with an anchor


def page(lesson: Lesson, folder: Path, root: Path = delta.ROOT) -> str:
    """Return the whole page. Its links to files of the tree are relative to `folder`."""
    numbers = {entry.name: number for number, entry in enumerate(lesson.entries, start=1)}
    body = Body(lesson, numbers, partial(from_folder, folder.resolve(), root.resolve()), root)
    return (
        (HERE / "lesson.html")
        .read_text(encoding="utf-8")
        .replace("{{css}}", style("lesson.css") + style("lesson_code.css"))
        .replace("{{below}}", escape(lesson.below))
        .replace("{{above}}", escape(lesson.above))
        .replace("{{size}}", size(lesson))
        .replace("{{tour}}", "".join(_tour(stop, numbers) for stop in lesson.stops))
        .replace("{{contents}}", _contents(lesson))
        .replace("{{body}}", "".join(body.stop(stop) for stop in lesson.stops))
    )


def anchor(symbol: str) -> str:
    """Return the id of a symbol's section: its name without signs that an id cannot have."""
    return re.sub(r"[^\w.:-]", "", symbol)


def size(lesson: Lesson) -> str:
    """Return how many stops and entries a page has, as a text."""
    entries = f"{len(lesson.entries)} entr{'y' if len(lesson.entries) == 1 else 'ies'}"
    stops = f"{len(lesson.stops)} stop{'' if len(lesson.stops) == 1 else 's'}"
    return f"{stops} with {entries}" if lesson.is_divided else entries


def _contents(lesson: Lesson) -> str:
    """Return the table of the stops."""
    if not lesson.is_divided:
        return ""
    rows = []
    for stop in lesson.stops:
        lines, symbols = counts(stop)
        link = f'<a href="#stop-{stop.number}">{escape(stop.title)}</a>'
        rows.append(
            f"<tr><td>{stop.number}</td><td>{link}</td><td>{lines}</td><td>{symbols}</td></tr>"
        )
    head = "<tr><th>stop</th><th></th><th>lines</th><th>symbols</th></tr>"
    return f'<table class="contents">{head}{"".join(rows)}</table>'


def _tour(stop: Stop, numbers: Numbers) -> str:
    """Return the links to the entries of a stop, below its title."""
    title = f'<a href="#stop-{stop.number}">{stop.number}. {escape(stop.title)}</a>'
    items = []
    for entry in stop.entries:
        file, _, name = entry.name.partition(":")
        name = escape(name).replace(".", ".<wbr>") or "the whole file"
        items.append(
            f'<li class="{entry.kind}"><a href="#{anchor(entry.name)}">'
            f"<small>{escape(file)}</small> {name}</a></li>"
        )
    links = f'<ol start="{numbers[stop.entries[0].name]}">{"".join(items)}</ol>'
    return f"<p>{title}</p>{links}" if stop.title else links


def style(name: str) -> str:
    """Return a style sheet of the lessons."""
    return (HERE / name).read_text(encoding="utf-8")


def from_folder(folder: Path, root: Path, target: str) -> str | None:
    """Return the address of a target, as a page in a folder names it. None: it is not there."""
    file, mark, place = target.partition("#")
    if not (root / file).exists():
        return None
    path = Path(os.path.relpath(root / file, folder)).as_posix()
    return f"{quote(path)}{mark}{escape(place)}"


class Body:
    """The stops of a lesson, with their entries, notes and pointers, as HTML."""

    def __init__(self, lesson: Lesson, numbers: Numbers, address: Address, root: Path) -> None:
        self.numbers = numbers
        self.notes = lesson.notes
        self.pointers = pointers(lesson, root)
        self.address = address

    def stop(self, stop: Stop) -> str:
        """Return a section, or only the entries of a lesson that is not divided."""
        entries = "".join(map(self.entry, stop.entries))
        if not stop.title:
            return entries
        lines, symbols = counts(stop)
        return (
            f'<section id="stop-{stop.number}"><h1>{stop.number}. {escape(stop.title)}</h1>'
            f"<p>{_marked_up(stop.teaches)}</p><p>Lines {lines}, symbols {symbols}.</p>"
            f"{entries}</section>\n"
        )

    def entry(self, entry: Entry) -> str:
        file, _, name = entry.name.partition(":")
        title = f"<code>{escape(file)}</code>" + (f" <code>{escape(name)}</code>" if name else "")
        number = self.numbers[entry.name]
        parts = "".join(self._part(part, entry.name) for part in entry.parts)
        return (
            f'<details open class="entry" id="{anchor(entry.name)}"><summary><h2>{number}. {title} '
            f'<b class="{entry.kind}">{entry.kind}</b></h2>'
            f"<p>{_marked_up(entry.reason)}</p></summary>"
            f'<a class="here" href="#{anchor(entry.name)}" aria-label="a link to this entry">#</a>'
            f"{parts}</details>\n"
        )

    def _part(self, part: Part, entry: str) -> str:
        heading = ""
        if part.symbol != entry or part.moved:
            words = f"unchanged; also at {part.moved}" if part.moved else part.kind
            place = "" if part.symbol == entry else f' id="{anchor(part.symbol)}"'
            heading = f"<h3{place}><code>{escape(part.symbol)}</code> {escape(words)}</h3>"
        noted = {n: symbol for n, symbol in part.starts.items() if self._is_noted(symbol, part)}
        first, *others = segments(part, sorted(noted))
        beside = (
            f'<div class="noted">{self._note(noted[number])}{code}</div>'
            for number, code in zip(sorted(noted), others, strict=True)
        )
        return heading + self._links(part.symbol) + first + "".join(beside)

    def _is_noted(self, symbol: str, part: Part) -> bool:
        """Return whether something stands beside a symbol of a file or a class that was added."""
        has_words = symbol in self.notes or symbol in self.pointers
        return part.kind == "added" and symbol != part.symbol and has_words

    def _note(self, symbol: str) -> str:
        name = escape(symbol.partition(":")[2]).replace(".", ".<wbr>")
        text = f"<p>{_marked_up(self.notes[symbol])}</p>" if symbol in self.notes else ""
        return (
            f'<aside id="{anchor(symbol)}"><h4><code>{name}</code></h4>'
            f"{text}{self._links(symbol)}</aside>"
        )

    def _links(self, symbol: str) -> str:
        items = [f"<li>{self._pointer(pointer)}</li>" for pointer in self.pointers.get(symbol, [])]
        return f'<ul class="links">{"".join(items)}</ul>' if items else ""

    def _pointer(self, pointer: Pointer) -> str:
        """Return a link, or only its words if there is no address, such as that of a deck."""
        words = escape(pointer.words)
        if address := self.address(pointer.target):
            words = f'<a href="{address}">{words}</a>'
        names = escape(pointer.details).replace("_", "_<wbr>")
        details = f": <code>{names}</code>" if names else ""
        return f"{pointer.kind} {words}{details}"


def _marked_up(text: str) -> str:
    """Return a text of `DELTA.toml`, in which backticks stand around code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
