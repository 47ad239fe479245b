"""`python -m milestones propagate m2`: apply an edit of one milestone to all milestones above.

Each file is merged from milestone to milestone: the change below (old text, new text) is applied to
the milestone's own text. A file that was the same stays the same. If the lesson changed the same
lines, this is a conflict, and that file is written in no milestone. All merges are computed before
the first file is written.

Exit status: 0 everything was applied, or there was nothing to apply; 1 a conflict is left;
2 refused (no such milestone or commit).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table

from ...chain import (
    above,
    below,
    course_place,
    engines,
    extended,
    find_engine,
    is_elective,
    own_name,
    place,
    short,
)
from ...console import wide_console
from ...course import delta
from . import merge
from .merge import Step

EXAMPLE = """python -m milestones propagate m2 --dry-run
              python -m milestones propagate m2 --since HEAD~3
              python -m milestones propagate m2 --write-conflicts"""
DONE = {"same", "merged", "created", "deleted"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones propagate`."""
    parser.add_argument("milestone", help="the edited milestone: m2 or m2_continuous")
    parser.add_argument(
        "--since", default="HEAD", metavar="COMMIT", help="edits since this commit (default: HEAD)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan and write nothing")
    parser.add_argument(
        "--write-conflicts", action="store_true",
        help="write a file up to its first conflict, with markers; milestones above it must wait",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the steps as JSON")
    parser.set_defaults(root=delta.ROOT)


def main(args: argparse.Namespace) -> int:
    """Plan, write, and show what was done. Return the exit status."""
    try:
        milestone = find_engine(args.milestone, args.root)
        steps = plan(milestone, args.since, args.root)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    chosen = writable(steps, conflicts=args.write_conflicts)
    if not args.dry_run:
        merge.write(args.root, chosen)
    touched = {milestone, *(step.milestone for step in chosen)}
    notes = [] if args.dry_run else undeclared(args.root, touched)
    if args.json:
        rows = [{**step.described(), "written": step in chosen} for step in steps]
        written = {"dry_run": args.dry_run, "steps": rows, "notes": notes}
        sys.stdout.write(json.dumps(written, indent=1) + "\n")
    else:
        _report(milestone, args, steps, chosen, notes)
    return 1 if any(step.kind == "conflict" for step in steps) else 0


def plan(milestone: str, since: str, root: Path) -> list[Step]:
    """Return the step for each edited file and each milestone above, up to its first conflict.

    Raises `ValueError` if there is no such commit, or no milestone above.
    """
    uppers = above(milestone, root)
    if not uppers:
        raise ValueError(f"{milestone} is the highest milestone: there is nothing above it")
    steps = []
    for file in merge.edited(root, milestone, since):
        old = merge.text_at(root, since, f"{place(milestone)}/{file}")
        new = merge.text_of(root / place(milestone) / file)
        for upper in uppers:
            text = merge.text_of(root / place(upper) / file)
            if is_elective(upper):  # electives lie beside each other; few on another one
                extends = file in map(own_name, extended(upper, root))
                if text is not None and not extends:  # otherwise it uses the milestone's file
                    steps.append(merge.step(file, upper, old, new, text))
                continue
            step = merge.step(file, upper, old, new, text)
            steps.append(step)
            old, new = step.before, step.after
            # The edit was applied here already, perhaps by hand: go on from it.
            if step.kind == "unchanged":
                old = merge.text_at(root, since, f"{place(upper)}/{file}")
            if old == new or step.kind not in {*DONE, "unchanged"}:
                break
    return steps


def writable(steps: list[Step], *, conflicts: bool) -> list[Step]:
    """Return the steps to write: of each file all or none, or with `conflicts` up to a conflict."""
    torn = {step.file for step in steps if step.kind == "conflict"}
    chosen = [step for step in steps if conflicts or step.file not in torn]
    return [step for step in chosen if step.kind in DONE or step.kind == "conflict"]


def undeclared(root: Path, touched: set[str]) -> list[str]:
    """Return the differences without a declaration, around all milestones that were written."""
    notes = []
    for milestone in engines(root):
        lower = below(milestone, root)
        declares = (root / course_place(milestone) / "DELTA.toml").exists()
        if lower and declares and touched & {lower, milestone}:
            try:
                found = delta.found_in(milestone, root)
            except SyntaxError:  # conflict markers
                continue
            problems = delta.problems(delta.declared(milestone, root), found)
            notes += [f"{course_place(milestone)}/DELTA.toml: {problem}" for problem in problems]
    return notes


def _report(
    milestone: str,
    args: argparse.Namespace,
    steps: list[Step],
    chosen: list[Step],
    notes: list[str],
) -> None:
    console = wide_console()
    if not steps:
        console.print(f"{milestone} has no edits since {args.since}: there is nothing to apply")
        return
    table = Table("file", "milestone", "what", title=None, box=None, pad_edge=False)
    for step in steps:
        left = "" if step in chosen or step.kind not in DONE else " (not written)"
        table.add_row(step.file, step.milestone, f"{step.words}{left}")
    console.print(table)
    for step in steps:
        if step.kind == "conflict":
            console.print(_advice(milestone, args, step), style="bold")
    for note in notes:
        console.print(f"not declared yet: {note}")
    if args.dry_run:
        console.print("dry run: nothing was written")


def _advice(milestone: str, args: argparse.Namespace, step: Step) -> str:
    where = f"{place(step.milestone)}/{step.file}, {step.place}"
    if args.write_conflicts and not args.dry_run:
        then = f"python -m milestones propagate {short(step.milestone)}"
        return f"conflict in {where}: resolve it between the markers there, then run: {then}"
    return (
        f"conflict in {where}: {step.reason}. "
        f"Nothing of {step.file} was written above {milestone}; "
        f"--write-conflicts writes it up to this conflict, with markers"
    )
