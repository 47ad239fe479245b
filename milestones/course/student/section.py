"""A section of a handout: what is open in it, what is folded, and the predictions that it asks for.

The section of an exercise has its id in the heading. Other sections may ask for predictions, too:
"Measure it" in each handout. The page of week 6, `project`, is read in the same way.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...chain import course_place, find_engine, short
from ..catalog import find
from ..delta import ROOT
from .answers_file import PREDICTION, PROJECT, title_of

FOLD = re.compile(r"<details><summary>(.*?)</summary>\s*(.*?)\s*</details>\n?", re.DOTALL)
ANSWER = "Answer"  # the title of a fold
PREDICT, MEASURE, BREAK_IT = "**Predict.**", "**Measure.**", "**Break it.**"
# A link, or code, in which brackets are no link.
LINK = re.compile(r"`[^`]+`|!?\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]*)\)")


@dataclass(frozen=True)
class Piece:
    """A part of a section: open text, or the text of a fold with its title."""

    text: str
    fold: str = ""


@dataclass(frozen=True)
class Prediction:
    """A question, our answer, and the part of `ANSWERS.md` in which a prediction is kept."""

    question: str
    answer: str
    part: str

    @property
    def is_measured(self) -> bool:
        """Whether a measurement gives the answer."""
        return MEASURE in self.question


@dataclass(frozen=True)
class Section:
    """A section of the handout of a milestone."""

    milestone: str
    name: str  # of the exercise, or of the milestone: m3.2, m3
    title: str
    text: str

    @property
    def pieces(self) -> list[Piece]:
        """Its text in order, without links. The path of another page is written out."""
        parts = FOLD.split(LINK.sub(self._without_link, self.text))
        pieces = [Piece(parts[0])]
        for fold, folded, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            pieces += [Piece(folded, fold), Piece(text)]
        return [piece for piece in pieces if piece.text.strip()]

    @property
    def predictions(self) -> list[Prediction]:
        """What it asks for, in order. An answer follows its question."""
        found: list[Prediction] = []
        pieces = self.pieces
        for before, answer in pairwise(pieces):
            if answer.fold == ANSWER and PREDICT in before.text:
                question = before.text.rpartition(PREDICT)[2].strip()
                part = f"{PREDICTION} {len(found) + 1}" if found else PREDICTION
                found.append(Prediction(question, answer.text, part))
        return found

    def _without_link(self, link: re.Match[str]) -> str:
        if link["target"] is None:
            return link[0]
        if not link["target"].endswith(".md"):
            return link["text"]
        path = posixpath.normpath(f"{_folder(self.milestone)}/{link['target']}")
        return f"{link['text']}: `{path}`"


def sections_of(name: str, root: Path = ROOT) -> list[Section]:
    """Return the section of an exercise, or those of a handout that ask for other predictions.

    Raises `CatalogError` or `ValueError` that names what there is.
    """
    if "." in name:
        exercise = find(name, root)
        milestone, title = exercise.milestone, title_of(exercise)
        return [s for s in _all_sections(milestone, name, root) if s.title == title]
    milestone = name if name == PROJECT else find_engine(name, root)
    named = re.compile(rf"{short(milestone)}\.\d+: ")
    sections = _all_sections(milestone, name, root)
    return [s for s in sections if PREDICT in s.text and not named.match(s.title)]


def _folder(milestone: str) -> str:
    return f"milestones/{PROJECT}" if milestone == PROJECT else course_place(milestone)


def _all_sections(milestone: str, name: str, root: Path) -> list[Section]:
    page = (root / _folder(milestone) / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", page, flags=re.MULTILINE)
    return [
        Section(milestone, name, title, text)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    ]
