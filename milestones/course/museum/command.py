"""Find the bug in a run: eight bugs of other projects, each rebuilt in one of our engines.

`museum freed-duplicates` shows what its users saw, and a recorded run, step by step. Find the first
step after which an invariant is broken, and the invariant: `museum freed-duplicates 7 I2`. If you
are right, you see the change of our engine, the explanation, and the thread of the other project.

Exit status: 0 the run was shown, or the diagnosis is right; 1 it is wrong; 2 wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table

from common.displays.palette import use_palette
from common.tracing.player import page_of

from ..student.failure_words import INVARIANTS
from .exhibit import Exhibit, exhibits, find
from .run_table import run_table

EXAMPLE = "python -m milestones museum freed-duplicates"
REFUSALS = (ValueError,)
NAMES = [f"I{number}" for number in INVARIANTS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones museum`."""
    parser.add_argument("exhibit", nargs="?", help="the name of a bug, or its beginning")
    parser.add_argument("step", nargs="?", type=int, help="your diagnosis: the first wrong step")
    parser.add_argument("invariant", nargs="?", help=f"and what is broken: {', '.join(NAMES)}")
    parser.add_argument("--player", metavar="FILE", help="write the run as a page of the player")


def main(args: argparse.Namespace) -> int:
    """List the exhibits, show one, or check a diagnosis."""
    console = use_palette(Console())
    if args.exhibit is None:
        console.print(listed())
        console.print(f"\nOne of them:  {EXAMPLE}", style="dim", highlight=False)
        return 0
    exhibit = find(args.exhibit)
    if args.player:
        page = page_of(exhibit.recorded()["trace"])
        Path(args.player).write_text(page, encoding="utf-8")
        console.print(f"wrote {args.player}", highlight=False)
        return 0
    if args.step is None:
        show(exhibit, console)
        return 0
    if (named := str(args.invariant).upper()) not in NAMES:
        raise ValueError(f"name a step and an invariant: {exhibit.id} {args.step} I3")
    return judge(exhibit, args.step, named, console)


def listed() -> Table:
    """Return the exhibits as a table."""
    table = Table.grid(padding=(0, 2))
    for exhibit in exhibits():
        engine = exhibit.engine.partition("_")[0]
        table.add_row(
            f"[bold]{exhibit.id}[/]", engine, exhibit.title, f"[dim]{exhibit.upstream}[/]"
        )
    return table


def show(exhibit: Exhibit, console: Console) -> None:
    """Show what was seen, the requests, the run, and the question."""
    run = exhibit.recorded()
    console.print(
        f"[bold]{exhibit.title}[/]\n[dim]{exhibit.upstream}; rebuilt in {exhibit.engine}[/]\n"
    )
    console.print(Markdown(f"**What was seen.** {exhibit.seen}"))
    console.print("\nThe requests:", style="bold")
    requests = Table.grid(padding=(0, 2))
    for request in exhibit.workload["requests"]:
        when = f"before step {request['before']}" if "before" in request else "at the start"
        tokens = f"{request['max_tokens']} tokens"
        requests.add_row(f"[bold]{request['id']}[/]", when, tokens, repr(request["prompt"]))
    console.print(requests, highlight=False)
    if "reset_before" in exhibit.workload:
        console.print(f"The cache is flushed before step {exhibit.workload['reset_before']}.")
    size = exhibit.workload["config"]["page_size"]
    console.print(f"\nThe run, in pages of {size} tokens:", style="bold", highlight=False)
    console.print(run_table(run), highlight=False)
    console.print("\nThe answers:", style="bold")
    console.print(answers(run), highlight=False)
    if run["ended"]:
        console.print(f"\nThe run ended with {run['ended']}", style="red", highlight=False)
    console.print()
    console.print(Markdown(f"**Look.** {exhibit.look}"))
    console.print("\nWhich is the first step after which an invariant is broken, and which one?")
    command = f"python -m milestones museum {exhibit.id} STEP INVARIANT"
    console.print(f"{command}   ({', '.join(NAMES)})", style="dim", highlight=False)


def answers(run: dict[str, dict[str, str]]) -> Table:
    """Return what each request got, and the right answer where it is another one."""
    table = Table.grid(padding=(0, 2))
    for name, text in run["answers"].items():
        right = run["right"][name]
        table.add_row(f"[bold]{name}[/]", "right" if text == right else "wrong", repr(text))
        if text != right:
            table.add_row("", "it should be", repr(right), style="dim")
    return table


def judge(exhibit: Exhibit, step: int, invariant: str, console: Console) -> int:
    """Say whether a diagnosis is right, and explain the bug if it is. Return the exit status."""
    if step != exhibit.step:
        when = "later" if step < exhibit.step else "earlier"
        console.print(
            f"No: the first fault is {when} than step {step}.", style="red", highlight=False
        )
        return 1
    if invariant != exhibit.invariant:
        name = INVARIANTS[int(invariant[1:])][0]
        said = f"The step is right, but it is not {invariant}, {name}."
        console.print(said, style="red", highlight=False)
        return 1
    console.print(f"Yes: step {step}, {invariant}.", style="green", highlight=False)
    console.print(f"The check says: {exhibit.recorded()['fault']['message']}\n", highlight=False)
    console.print(Markdown(exhibit.answer))
    console.print(f"\nThe change of {exhibit.engine}:", style="bold", highlight=False)
    console.print(
        Syntax(exhibit.patch.read_text(encoding="utf-8"), "diff", background_color="default")
    )
    console.print(Markdown(f"**The code that is right:** {exhibit.here}"))
    console.print(f"\nRead the thread: {exhibit.link}", highlight=False)
    return 0
