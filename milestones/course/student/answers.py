"""`ANSWERS.md`, the file in which a student writes predictions and answers.

It is Markdown, one section for each exercise, in a fixed form. It is handed in with the code.

    ## m3.1: Pages as a request grows

    ### Prediction

    ### Break it

    ### Checkpoint
"""

from __future__ import annotations

import re

from ...chain import is_elective, short
from ..exercise import Exercise

FILE = "ANSWERS.md"
PARTS = ("Prediction", "Break it", "Checkpoint")


def template(exercises: tuple[Exercise, ...]) -> str:
    """Return the file before anything is written in it."""
    milestone = exercises[0].milestone
    title = milestone if is_elective(milestone) else f"Milestone {short(milestone)[1:]}"
    sections = [
        f"## {e.id}: {e.title}\n\n" + "\n\n".join(f"### {part}" for part in PARTS)
        for e in exercises
    ]
    return "\n\n".join([f"# {title}: predictions and answers", *sections]) + "\n"


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
