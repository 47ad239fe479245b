"""`python -m milestones propagate m2`: carry an edit of one rung up the ladder.

Each file is merged rung by rung: what changed below (old text, new text) into the rung's own text.
A file that was the same stays the same. Where the lesson touched the same lines, nothing of that
file is written, on any rung; everything is decided before the first byte is.

Exit status: 0 all was carried, or there was nothing to carry; 1 a conflict is left; 2 it was
refused (no such rung or commit).
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from .. import delta
from . import merge, record
from .console import wide_console
from .merge import Step

EXAMPLE = """python -m milestones propagate m2 --dry-run
              python -m milestones propagate m2 --since HEAD~3
              python -m milestones propagate m2 --write-conflicts"""
DONE = {"same", "merged", "created", "deleted"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m milestones propagate`."""
    parser.add_argument("rung", help="the rung that was edited: m2 or m2_continuous")
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="edits since when (HEAD)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, write not")
    parser.add_argument(
        "--write-conflicts", action="store_true",
        help="write the first conflict of a file with its marks; rungs above it wait",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="what is done, as data")
    parser.set_defaults(root=delta.ROOT)


def main(args: argparse.Namespace) -> int:
    """Plan, write, and say what was done; the exit status."""
    try:
        rung = record.find_milestone(args.rung, args.root)
        steps = plan(rung, args.since, args.root)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    chosen = writable(steps, conflicts=args.write_conflicts)
    if not args.dry_run:
        merge.write(args.root, chosen)
    notes = [] if args.dry_run else undeclared(args.root, {rung, *(step.rung for step in chosen)})
    if args.json:
        rows = [{**step.described(), "written": step in chosen} for step in steps]
        written = {"dry_run": args.dry_run, "steps": rows, "notes": notes}
        sys.stdout.write(json.dumps(written, indent=1) + "\n")
    else:
        _report(rung, args, steps, chosen, notes)
    return 1 if any(step.kind == "conflict" for step in steps) else 0


def plan(rung: str, since: str, root: Path) -> list[Step]:
    """What becomes of each edited file on each rung above, as far as it can be carried.

    Raises `ValueError` where Git knows no such commit, or nothing lies above.
    """
    rungs = record.milestones(root)
    above = rungs[rungs.index(rung) + 1 :]
    if not above:
        raise ValueError(f"{rung} is the highest rung: there is nothing to carry it to")
    steps = []
    for file in merge.edited(root, rung, since):
        old = merge.text_at(root, since, f"{rung}/{file}")
        new = merge.text_of(root / rung / file)
        for upper in above:
            step = merge.step(file, upper, old, new, merge.text_of(root / upper / file))
            steps.append(step)
            old, new = step.before, step.after
            if step.kind == "unchanged":  # carried by hand, perhaps: go on from what was done here
                old = merge.text_at(root, since, f"{upper}/{file}")
            if old == new or step.kind not in {*DONE, "unchanged"}:
                break
    return steps


def writable(steps: list[Step], *, conflicts: bool) -> list[Step]:
    """Of each file all steps or none; with `conflicts`, those up to its conflict and that too."""
    torn = {step.file for step in steps if step.kind == "conflict"}
    chosen = [step for step in steps if conflicts or step.file not in torn]
    return [step for step in chosen if step.kind in DONE or step.kind == "conflict"]


def undeclared(root: Path, touched: set[str]) -> list[str]:
    """Differences that no `DELTA.toml` declares, on rungs that were written and those above."""
    notes, rungs = [], record.milestones(root)
    for below, rung in pairwise(rungs):
        if touched & {below, rung} and (root / "milestones" / rung / "DELTA.toml").exists():
            try:
                found = delta.found(root / below, root / rung)
            except SyntaxError:  # marks of a conflict
                continue
            problems = delta.problems(delta.declared(rung, root), found)
            notes += [f"milestones/{rung}/DELTA.toml: {problem}" for problem in problems]
    return notes


def _report(
    rung: str, args: argparse.Namespace, steps: list[Step], chosen: list[Step], notes: list[str]
) -> None:
    console = wide_console()
    if not steps:
        console.print(f"{rung} has no edits against {args.since}: nothing to carry")
        return
    table = Table("file", "rung", "what", title=None, box=None, pad_edge=False)
    for step in steps:
        left = "" if step in chosen or step.kind not in DONE else " (not written)"
        table.add_row(step.file, step.rung, f"{step.words}{left}")
    console.print(table)
    for step in steps:
        if step.kind == "conflict":
            console.print(_advice(rung, args, step), style="bold")
    for note in notes:
        console.print(f"not declared yet: {note}")
    if args.dry_run:
        console.print("a dry run: nothing was written")


def _advice(rung: str, args: argparse.Namespace, step: Step) -> str:
    where = f"{step.rung}/{step.file}, {step.place}"
    if args.write_conflicts and not args.dry_run:
        then = f"python -m milestones propagate {step.rung.partition('_')[0]}"
        return f"conflict in {where}: mend the marks there, then run: {then}"
    return (
        f"conflict in {where}: {step.reason}. Nothing of {step.file} was written above {rung}; "
        f"--write-conflicts writes it up to there, with marks"
    )
