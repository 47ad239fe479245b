"""Read a deck from Markdown into slides.

    ---                        the front matter: title and about, a line under the title; and
    title: Continuous batching     minutes, for a deck that is no lecture of 45: `minutes: 24-40`
    ---
    # A slide's title {.predict}      classes in braces
    Text. {{ladder.engines.m2_continuous.batch.tokens_per_second | .0f}} tokens/s.

    |||                        the column to the right begins
    ===                        the columns end, a row below begins
    +++                        what follows appears at the next key

    Note: 2 min                the speaker's notes, which begin with how long the slide takes

    ---                        the next slide

These blocks stand between three backticks: `code PLACE` and `diff BELOW ABOVE`, with trimming
commands, and `mutant ENGINE NAME`, a mistake of the course (`sources.py`); `figure NAME ...`
(`FIGURES` below); `sequence` and `boxes` (`diagrams.py`); `stops BELOW ABOVE`, the stops of a
lesson (`stops.py`); `gantt`, spans in rows (`charts.py`); `keys`, the meaning of the colours, with
one `class: words` per line (`charts.py`); `invariants`, what breaks without each (`invariants.py`).
Any other block is shown unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from milestones.course.decks import parts_of

from . import charts, diagrams, figures, ideas, ideas_electives, inputs, memory
from .facts import filled
from .invariants import invariants
from .ladder import ladder
from .sources import (
    ROOT,
    BuildError,
    Line,
    as_html,
    difference,
    font_size,
    mutant_lines,
    trimmed,
)
from .stops import Walk

MAX_CODE_LINES = 60
MINUTES = "35-55"  # of a deck that does not say how long it takes

FIGURES: dict[str, Callable[..., str]] = {
    "steps": figures.steps, "words": figures.words, "rows": memory.rows, "pages": memory.pages,
    "tree": memory.nodes, "growth": charts.growth,
    "roofline": charts.roofline, "lanes": charts.lanes, "triangle": ideas.triangle,
    "streaming": ideas.streaming, "tiles": ideas.tiles, "futures": ideas.futures,
    "same-memory": memory.same_memory, "translation": memory.translation,
    "split": memory.split, "shared": memory.shared, "drafts": ideas_electives.drafts,
    "two-rows": ideas_electives.two_rows, "masks": ideas_electives.masks,
    "swaps": ideas_electives.swaps, "pooled": ideas_electives.pooled,
    "slots": ideas_electives.slots, "goodput": charts.goodput, "request": inputs.request,
    "rectangle": inputs.rectangle, "flat": inputs.flat, "ladder": ladder,
}  # fmt: skip


@dataclass
class Slide:
    """One slide as HTML."""

    title: str
    classes: list[str]
    body: str
    notes: str
    minutes: float


@dataclass
class Deck:
    """A deck that was read, with its slides as HTML."""

    name: str
    title: str
    about: str
    slides: list[Slide] = field(default_factory=list)
    code_lines: int = 0

    @property
    def minutes(self) -> float:
        return sum(slide.minutes for slide in self.slides)


class Reader:
    """Reads one deck. Raises `BuildError` with the number of the slide."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        self.markdown.renderer.rules["fence"] = self._fence  # type: ignore[attr-defined]
        self.classes: list[str] = []
        self.code_lines = 0  # since the last title
        self.walk: Walk | None = None  # from the slide on that shows the stops

    def deck(self) -> Deck:
        """Return the whole deck."""
        _, front, *slides = parts_of(self.path.read_text(encoding="utf-8"), "---")
        facts = dict(re.findall(r"^(\w+): *(.*)$", front, re.MULTILINE))
        deck = Deck(self.path.stem, facts["title"], facts["about"])
        for number, text in enumerate(slides, 1):
            try:
                deck.slides.append(self._slide(text))
            except BuildError as error:
                raise BuildError(f"{self.path.name}, slide {number}: {error}") from None
            if "title" in self.classes:
                deck.code_lines, self.code_lines = deck.code_lines + self.code_lines, 0
            if self.code_lines > MAX_CODE_LINES:
                raise BuildError(
                    f"{self.path.name}, slide {number}: the slides since the last title show more "
                    f"than {MAX_CODE_LINES} lines of code: show only the code that matters"
                )
        deck.code_lines += self.code_lines
        least, most = map(int, facts.get("minutes", MINUTES).split("-"))
        if not least <= deck.minutes <= most:
            raise BuildError(
                f"{self.path.name} takes {deck.minutes:g} minutes by its notes: the sum must be "
                f"{least} to {most}"
            )
        return deck

    def _slide(self, text: str) -> Slide:
        text, mark, notes = text.partition("\nNote: ")
        found = re.match(r"\s*# (.+?)(?: \{([.\w -]+)\})?\n", text + "\n")
        timed = re.match(r"([\d.]+) min\n", notes)
        if not found:
            raise BuildError("a slide must begin with its title, `# ...`")
        if not mark or not timed or len(notes.split()) < 15:
            raise BuildError(f"{found[1]!r} needs notes: `Note: 2 min`, and the text to say")
        self.classes = re.findall(r"\.([\w-]+)", found[2] or "")
        now, *later = parts_of((text + "\n")[found.end() :], "+++")
        body = self._rows(now) + "".join(
            f'<div class="fragment part">{self._rows(part)}</div>' for part in later
        )
        self._check_links(body)
        return Slide(
            title=self.markdown.renderInline(filled(found[1])),
            classes=self.classes,
            body=body,
            notes=self.markdown.render(filled(notes[timed.end() :])),
            minutes=float(timed[1]),
        )

    def _rows(self, text: str) -> str:
        html = []
        for row in parts_of(text, "==="):
            texts = [part for part in parts_of(row, "|||") if part.strip()]
            columns = [self.markdown.render(filled(part)) for part in texts]
            if len(columns) < 2:
                html += columns
            else:
                wide = [c for c in self.classes if c.startswith("wide")]
                cells = "".join(f"<div>{column}</div>" for column in columns)
                html.append(f'<div class="{" ".join(["columns", *wide])}">{cells}</div>')
        return "".join(html)

    def _fence(self, tokens: list[Token], number: int, *_: object) -> str:
        words, body = shlex.split(tokens[number].info), tokens[number].content
        kind, args = (words[0], words[1:]) if words else ("", [])
        options = dict(arg.split("=", 1) for arg in args if "=" in arg and ":" not in arg)
        places = [arg for arg in args if arg not in (f"{k}={v}" for k, v in options.items())]
        if kind == "code":
            return self._code(trimmed(places[0], body), places[0], places[0])
        if kind == "diff":
            below, above = places
            title = f"{below.partition(':')[0]} → {above}"
            return self._code(difference(below, above, body), above, title)
        if kind == "stops":
            self.walk = Walk(*places)
            return self.walk.table()
        if kind == "mutant":
            return as_html(mutant_lines(*places), f"the mistake, in {places[0]}")
        if kind == "figure" and places[0] == "bars":
            return charts.bars(body, **options)
        if kind == "figure":
            return FIGURES[places[0]](*places[1:], **options)
        if kind == "sequence":
            return diagrams.sequence(body, **options)
        if kind == "gantt":
            return charts.gantt(body, **options)
        if kind == "keys":
            return charts.keys(body)
        if kind == "invariants":
            return invariants(body, self.markdown.renderInline)
        if kind == "boxes":
            return diagrams.boxes(body, **options)
        plain, size = body.replace("&", "&amp;").replace("<", "&lt;"), font_size(body.splitlines())
        return f'<pre class="plain"><code style="--size: {size}">{plain}</code></pre>'

    def _code(self, lines: list[Line], place: str, title: str) -> str:
        self.code_lines += sum(line.kind != "del" for line in lines)
        title += self.walk.caption(place) if self.walk else ""
        return as_html(lines, title, "m" if "morph" in self.classes else "")

    def _check_links(self, html: str) -> None:
        for target in re.findall(r'(?:href|src)="([^"]*)"', html):
            if not target.startswith("https://") and not exists(self.path.parent, target):
                raise BuildError(f"there is nothing at {target}")


def exists(folder: Path, target: str) -> bool:
    """Return whether a relative link leads to a file, and to a heading in it if it names one."""
    name, _, anchor = target.partition("#")
    path = (folder / name).resolve()
    if not path.exists() or ROOT not in path.parents:
        return False
    return not anchor or anchor in headings(path.read_text(encoding="utf-8"))


def headings(text: str) -> Iterator[str]:
    """Yield the anchors of the headings of a page, in the form that GitHub uses."""
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
