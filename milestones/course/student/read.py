"""Show the section of an exercise as the handout has it, with answers and hints folded.

At *Predict*, the command waits for your prediction, which it keeps in `ANSWERS.md` as `predict`
does, and then unfolds the answer. With the name of a milestone, it shows the sections of the
handout that ask for other predictions. In a pipe, all answers are left out.

Exit status: 0; 2 there is no such exercise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from ..catalog import CatalogError
from ..delta import ROOT
from .predict import predicted, show_answer
from .section import ANSWER, BREAK_IT, Section, sections_of

EXAMPLE = "python -m milestones read m3.2"
REFUSALS = (ValueError,)
WIDTH = 100  # columns, at most
SKIP = "Enter alone unfolds the answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones read`."""
    parser.add_argument("exercise", help="the id of an exercise, or a milestone: m3.2, m3")
    parser.add_argument("--answers", action="store_true", help="unfold all answers, and do not ask")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Show the section."""
    console = Console()
    console.width = min(console.width, WIDTH)
    sections = sections_of(args.exercise, root)
    if not sections:
        raise CatalogError(f"the handout of {args.exercise} has no such section")
    asks = console.is_terminal and sys.stdin.isatty() and not args.answers
    for section in sections:
        show(console, section, root, asks=asks, answers=args.answers)
    return 0


def show(console: Console, section: Section, root: Path, *, asks: bool, answers: bool) -> None:
    """Print a section in order. A fold is unfolded, or is one line that says how to see it."""
    by_answer = {prediction.answer: prediction for prediction in section.predictions}
    hints_are_named, last = False, ""
    console.print(Markdown(f"## {section.title}"))
    for piece in section.pieces:
        if piece.fold.endswith("hint"):
            if not hints_are_named:
                folded(console, f"hints: python -m milestones hint {section.name}")
            hints_are_named = True
        elif piece.fold == ANSWER and not answers:
            prediction = by_answer.get(piece.text)
            if prediction and asks:
                predicted(console, section, prediction, root, SKIP)
                show_answer(console, prediction)
            elif prediction:
                folded(
                    console, f"answer: python -m milestones predict {section.name}, or --answers"
                )
            elif BREAK_IT not in last:
                folded(console, "answer: --answers unfolds it")
            else:
                folded(
                    console,
                    f"answer: --answers; python -m milestones break {section.name} tries your own",
                )
        else:
            last = piece.text
            title = {"": "", ANSWER: "The answer."}.get(piece.fold, piece.fold)
            console.print()
            console.print(Markdown(f"**{title}** {piece.text}" if title else piece.text))


def folded(console: Console, words: str) -> None:
    """Print a line for a fold."""
    console.print(f"\n▸ folded: {words}", style="dim", highlight=False)
