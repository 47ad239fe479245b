"""Ask for your prediction, keep it in `ANSWERS.md`, and then show the answer.

The file also has a place for what *Break it* showed, and for the checkpoint answers. Hand it in
with your code.

Exit status: 0 the answer was shown; 1 no prediction was written; 2 there is no such exercise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from ..delta import ROOT
from ..record import RecordError, find, load
from .answers import FILE, prediction_of, template, with_prediction
from .handout import part

EXAMPLE = "python -m milestones predict m3.2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones predict`."""
    parser.add_argument("exercise", help="the id of an exercise: m3.2")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Ask, keep and show."""
    console = Console()
    try:
        exercise = find(args.exercise, root)
        question, answer = part("Predict", exercise, root)
        if not question:
            raise RecordError(f"the handout has no prediction for {exercise.id}")
    except RecordError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 2
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
