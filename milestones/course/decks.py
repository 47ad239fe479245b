"""Find the slides that show code. A student's tree has no decks, and then there are none.

A deck is Markdown: a line of three dashes begins a slide, and a slide begins with its title. The
blocks `code PLACE` and `diff BELOW ABOVE` name code (`slides/deck.py` describes all blocks).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DECKS = "slides/decks"
BUILT = "slides/dist"
BLOCK = re.compile(r"^```(?:code|diff \S+) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class CodeSlide:
    """A slide, and the code on it, such as `folder/kv_cache.py:PageTable.append`."""

    deck: str
    number: int  # from 1
    title: str
    places: tuple[str, ...]

    @property
    def built(self) -> str:
        """The slide in the deck's HTML file, from the root. Addresses count from 0."""
        return f"{BUILT}/{self.deck}.html#/{self.number - 1}"


def code_slides(root: Path) -> Iterator[CodeSlide]:
    """Yield the slides of all decks that show code."""
    for path in sorted((root / DECKS).glob("*.md")):
        _, _front, *slides = parts_of(path.read_text(encoding="utf-8"), "---")
        for number, text in enumerate(slides, start=1):
            if places := tuple(BLOCK.findall(text)):
                title = re.search(r"^# (.+?)(?: \{[.\w -]+\})?$", text, re.MULTILINE)
                words = re.sub(r"\{\{.*?\}\}", "…", title[1] if title else "")
                yield CodeSlide(path.stem, number, re.sub(r"[`*]", "", words), places)


def parts_of(text: str, mark: str) -> list[str]:
    """Split a deck or a slide at the lines that are `mark`. Lines in code blocks do not count."""
    parts, fenced = [[]], False  # type: list[list[str]], bool
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if line.strip() == mark and not fenced:
            parts.append([])
        else:
            parts[-1].append(line)
    return ["\n".join(part) for part in parts]
