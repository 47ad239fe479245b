"""Ask for your prediction, keep it in `ANSWERS.md`, and then show the answer.

`ANSWERS.md` has a section for each exercise, in a fixed form: "## m3.1: The title", and in it
"### Prediction", "### Break it" and "### Checkpoint". Hand it in with your code.

Exit status: 0 the answer was shown; 1 no prediction was written; 2 there is no such exercise.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from ...chain import is_elective, short
from ..catalog import CatalogError, find, load
from ..delta import ROOT
from ..exercise import Exercise

EXAMPLE = "python -m milestones predict m3.2"
REFUSALS = (CatalogError,)
FILE = "ANSWERS.md"
PARTS = ("Prediction", "Break it", "Checkpoint")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones predict`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Ask, keep and show."""
    console = Console()
    exercise = find(args.exercise, root)
    question, answer = exercise.part("Predict", root)
    if not question:
        raise CatalogError(f"the handout has no prediction for {exercise.id}")
    console.print(Markdown(f"**{exercise.id}, Predict.** {question}"))
    path = root / FILE
    exercises = load(exercise.milestone, root, strict=False)
    text = path.read_text(encoding="utf-8") if path.is_file() else template(exercises)
    if prediction := prediction_of(text, exercise):
        console.print(f"\nYour prediction, from {FILE}:", style="dim", highlight=False)
        console.print(Markdown(prediction))
    else:
        prediction = asked(console)
        if not prediction:
            console.print("no prediction was written, so the answer is not shown", style="yellow")
            return 1
        path.write_text(with_prediction(text, exercise, prediction), encoding="utf-8")
        console.print(f"kept in {FILE}", style="dim", highlight=False)
    console.print()
    console.print(Markdown(f"**The answer.** {answer}"))
    return 0


def asked(console: Console) -> str:
    """Return the lines that a person writes, up to an empty line."""
    console.print("\nYour prediction, up to an empty line:", style="dim")
    lines: list[str] = []
    for line in sys.stdin:
        if not line.strip() and lines:
            break
        lines += [line.rstrip()] if line.strip() else []
    return "\n".join(lines)


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
