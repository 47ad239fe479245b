"""Ask for your prediction, keep it in `ANSWERS.md`, and then show the answer.

With the name of a milestone, the questions of its handout that belong to no exercise are asked:
those of "Measure it", for example.

Exit status: 0 the answer was shown; 1 no prediction was written; 2 there is no such exercise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from ..catalog import CatalogError
from ..delta import ROOT
from .answers_file import FILE, write, written
from .section import Prediction, Section, sections_of

EXAMPLE = "python -m milestones predict m3.2"
REFUSALS = (ValueError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones predict`."""
    parser.add_argument("exercise", help="the id of an exercise, or a milestone: m3.2, m3")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Ask, keep and show, one question after the other."""
    console = Console()
    asked_for = [(s, p) for s in sections_of(args.exercise, root) for p in s.predictions]
    if not asked_for:
        raise CatalogError(f"the handout has no prediction for {args.exercise}")
    for section, prediction in asked_for:
        title = section.name if "." in section.name else section.title
        console.print(Markdown(f"**{title}, Predict.** {prediction.question}"))
        if not predicted(console, section, prediction, root):
            console.print("no prediction was written, so the answer is not shown", style="yellow")
            return 1
        show_answer(console, prediction)
    return 0


def predicted(
    console: Console, section: Section, prediction: Prediction, root: Path, skip: str = ""
) -> bool:
    """Show the prediction that was kept, or ask for one and keep it. Return whether there is one.

    skip: what Enter alone does. Without it, a prediction must be written.
    """
    where = root, section.milestone, section.title, prediction.part
    if kept := written(*where):
        console.print(f"\nYour prediction, from {FILE}:", style="dim", highlight=False)
        console.print(Markdown(kept))
        return True
    if not (words := asked(console, skip)):
        return False
    write(*where, words)
    console.print(f"kept in {FILE}", style="dim", highlight=False)
    return True


def show_answer(console: Console, prediction: Prediction) -> None:
    """Show our answer. A measurement comes first, so a person at a terminal is waited for."""
    if prediction.is_measured and sys.stdin.isatty():
        console.print("\nMeasure now, in another terminal. Enter shows our answer.", style="dim")
        sys.stdin.readline()
    console.print()
    console.print(Markdown(f"**The answer.** {prediction.answer}"))
    console.print()


def asked(console: Console, skip: str = "") -> str:
    """Return the lines that a person writes, up to an empty line."""
    hint = f" ({skip})" if skip else ""
    console.print(f"\nYour prediction, up to an empty line{hint}:", style="dim", highlight=False)
    lines: list[str] = []
    for line in sys.stdin:
        if not line.strip() and (lines or skip):
            break
        lines += [line.rstrip()] if line.strip() else []
    return "\n".join(lines)
