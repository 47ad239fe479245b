"""`ANSWERS.md`: predictions, what *Break it* showed, and answers. Hand it in with your code.

It has a section for each exercise, in a fixed form: "## m3.1: The title", and in it
"### Prediction", "### Break it" and "### Checkpoint". Other questions of a handout get a section
with the title of theirs when a prediction is written.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...chain import is_elective, short
from ..catalog import load
from ..exercise import Exercise

FILE = "ANSWERS.md"
PROJECT = "project"  # week 6, which has no exercises
PREDICTION, BREAK_IT, CHECKPOINT = PARTS = ("Prediction", "Break it", "Checkpoint")


def written(root: Path, milestone: str, title: str, part: str) -> str:
    """Return what is written in a part of a section, or "" if nothing is."""
    text = _read(root, milestone)
    found = _place(text, title, part)
    return found[1].strip() if found else ""


def write(root: Path, milestone: str, title: str, part: str, words: str) -> None:
    """Write words at the end of a part. A part that is missing is added to the file."""
    text = _read(root, milestone)
    found = _place(text, title, part)
    if found is None:
        text = _with_part(text, title, part)
        found = _place(text, title, part)
        assert found is not None
    before, after = text[: found.end(1)].rstrip(), text[found.end(1) :].lstrip()
    text = f"{before}\n\n{words}\n" + (f"\n{after}" if after else "")
    (root / FILE).write_text(text, encoding="utf-8")


def title_of(exercise: Exercise) -> str:
    """Return the title of an exercise's section, as in the handout."""
    return f"{exercise.id}: {exercise.title}"


def _read(root: Path, milestone: str) -> str:
    """Return the file, or what it is before anything is written in it."""
    if (root / FILE).is_file():
        return (root / FILE).read_text(encoding="utf-8")
    if milestone == PROJECT:
        return "# Project: predictions and answers\n"
    name = milestone if is_elective(milestone) else f"Milestone {short(milestone)[1:]}"
    sections = [
        f"## {title_of(e)}\n\n" + "\n\n".join(f"### {part}" for part in PARTS)
        for e in load(milestone, root, strict=False)
    ]
    return "\n\n".join([f"# {name}: predictions and answers", *sections]) + "\n"


def _place(text: str, title: str, part: str) -> re.Match[str] | None:
    """Return where a part is written: group 1."""
    heading = rf"^## {re.escape(title)}\n(?:(?!## )[^\n]*\n)*?### {re.escape(part)}(?:\n|\Z)"
    return re.search(rf"{heading}(.*?)(?=^#{{2,3}} |\Z)", text, re.MULTILINE | re.DOTALL)


def _with_part(text: str, title: str, part: str) -> str:
    """Return the file with an empty part at the end of its section, or in a new section."""
    heading = rf"^## {re.escape(title)}\n"
    section = re.search(rf"{heading}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return f"{text.rstrip()}\n\n## {title}\n\n### {part}\n"
    before, after = text[: section.end()].rstrip(), text[section.end() :]
    return f"{before}\n\n### {part}\n" + (f"\n{after}" if after else "")
