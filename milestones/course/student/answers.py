"""The file in which a student writes predictions and answers: `answers/m3.md` of the tree.

It is Markdown, one section for each exercise, in a fixed form. It is handed in with the code.

    ## m3.1: Pages as a request grows

    ### Prediction

    ### Checkpoint
"""

from __future__ import annotations

import re
from pathlib import Path

from ..exercise import Exercise

PARTS = ("Prediction", "Checkpoint")


def path_of(exercise: Exercise, root: Path) -> Path:
    """Return the file of an exercise's milestone."""
    return root / "answers" / f"{exercise.milestone.partition('_')[0]}.md"


def template(exercises: tuple[Exercise, ...]) -> str:
    """Return the file before anything is written in it."""
    number = exercises[0].milestone.partition("_")[0][1:]
    sections = [
        f"## {e.id}: {e.title}\n\n" + "\n\n".join(f"### {part}" for part in PARTS)
        for e in exercises
    ]
    return "\n\n".join([f"# Milestone {number}: predictions and answers", *sections]) + "\n"


def prediction_of(text: str, exercise: Exercise) -> str:
    """Return what is written under a prediction, or "" if nothing is."""
    found = place(text, exercise)
    return text[found.start(1) : found.end(1)].strip() if found else ""


def with_prediction(text: str, exercise: Exercise, prediction: str) -> str:
    """Return the file with a prediction. A file without the section gets one at its end."""
    found = place(text, exercise)
    if found is None:
        text += "\n" + template((exercise,)).partition("\n\n")[2]
        found = place(text, exercise)
        assert found is not None
    return f"{text[: found.start(1)]}\n\n{prediction}\n\n{text[found.end(1) :].lstrip()}"


def place(text: str, exercise: Exercise) -> re.Match[str] | None:
    """Return where the prediction of an exercise is written: group 1."""
    heading = rf"^## {re.escape(exercise.id)}: [^\n]*\n+### {PARTS[0]}"
    return re.search(heading + r"(.*?)(?=^#{2,3} |\Z)", text, re.MULTILINE | re.DOTALL)
