"""Compare your tree with a base tree, and judge whether your change has gained.

`project check --base COMMIT --target shared` runs the bench's workloads on both trees. First it
counts in virtual time: counters are the same on every machine. If none of the target differs, it
measures pairs in turns. The change is shown if the interval of the target lies above 1.20, and that
of each other workload above 0.97.

The shared suite is the referee: --suite runs it, and does not accept changed tests of the base.

Exit status: 0 shown; 1 not shown; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import EMBEDDED_MODEL, EngineConfig, load_model
from common.displays.workload import Workload

from ...chain import find_engine
from ...lab.bench.workloads import PREFILLS, WORKLOADS, workload
from ..delta import ROOT
from .compare import COUNTERS, Counted, count, engine_in, pairs, tree_of
from .judge import Judgement, judge, shown

EXAMPLE = "python -m milestones project check --base HEAD~1 --target shared"
REFUSALS = (ValueError, RuntimeError)
NAMES = [name for name in WORKLOADS if name not in PREFILLS]
TINY = "tiny-llama"  # in virtual time, a model only has to give tokens
ROUNDS = 6  # the fewest pairs that have an interval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones project`."""
    parser.add_argument("action", choices=["check"])
    parser.add_argument(
        "--target", choices=[*WORKLOADS], required=True, help="the workload that gains"
    )
    parser.add_argument("--base", default="HEAD", help="a commit or a folder (default: HEAD)")
    parser.add_argument("--engine", default="m5", help="default: %(default)s")
    parser.add_argument(
        "--by", choices=["counters", "time"],
        help="default: by counters, if any of the target differs, and else by time",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs (default: %(default)s)")
    parser.add_argument(
        "--workload", action="append", choices=NAMES, metavar="NAME",
        help="only these and the target, for a first look: all are needed to be shown",
    )  # fmt: skip
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="by time (default: %(default)s)")
    parser.add_argument("--suite", action="store_true", help="run the shared suite, too")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Measure, judge and show."""
    console = Console()
    engine = find_engine(args.engine, root)
    wanted = [*dict.fromkeys([*NAMES, args.target])]
    names = [n for n in wanted if not args.workload or n in (*args.workload, args.target)]
    if args.target in PREFILLS:  # longer than the tiny model allows, and of one step
        args.by = "time"
    with tree_of(args.base, root) as folder:
        base = replace(engine_in(folder, engine), name="base")
        change = replace(engine_in(root, engine), name="change")

        def say(words: str) -> None:
            console.print(words, style="dim", highlight=False)

        counted: dict[str, Counted] = {}
        if args.by != "time":
            counted = count(works_of(names, TINY), base, change, say)
            console.print(counters_table(counted))
        if counted and (args.by == "counters" or counted[args.target].differs):
            ratios = {name: [both.ratio] for name, both in counted.items()}
            judgements = judge(args.target, ratios, exact=True)
        else:
            works = works_of(names, args.model)
            ratios = pairs(works, base, change, args.rounds, say)
            judgements = judge(args.target, ratios)
        passes = suite(engine, folder, root, console, run=args.suite)
    console.print(judgement_table(judgements))
    is_shown = shown(judgements, passes) and len(names) == len(wanted)
    console.print(verdict(is_shown, missing=len(wanted) - len(names), passes=passes))
    return 0 if is_shown else 1


def works_of(names: Sequence[str], model: str) -> dict[str, Workload]:
    """Return workloads of the bench, with tokens that the model has."""
    vocab_size = load_model(EngineConfig(model=model, device="cpu")).vocab_size
    return {name: workload(name, model, vocab_size) for name in names}


def suite(engine: str, base: Path, root: Path, console: Console, *, run: bool) -> bool | None:
    """Name the command of the shared suite, or run it. Return whether it passes, None: not run."""
    command = ["-m", "pytest", "tests", f"--milestone={engine}"]
    changed = changed_tests(base, root)
    if changed:
        console.print(f"tests that differ from the base: {', '.join(changed)}", highlight=False)
    if not run:
        console.print(f"The referee:  python {' '.join(command)}", highlight=False)
        return None
    return not changed and subprocess.run([sys.executable, *command], cwd=root).returncode == 0


def changed_tests(base: Path, root: Path) -> list[str]:
    """Return the tests of the base that the tree has changed or removed. New tests are welcome."""
    return sorted(
        name
        for path in (base / "tests").rglob("*.py")
        if not (root / (name := path.relative_to(base).as_posix())).is_file()
        or (root / name).read_bytes() != path.read_bytes()
    )


def counters_table(counted: Mapping[str, Counted]) -> Table:
    """Return the counters of both trees, as base → change where they differ."""
    table = Table(box=None, padding=(0, 2), header_style="dim", title="counters, base → change")
    for column in ("workload", "steps", "padding", "prompt tokens", "retracted", "virtual s"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    assert len(table.columns) == len(COUNTERS) + 2
    for name, both in counted.items():
        before = [*map(str, both.counts(both.base)), f"{both.base.seconds:.3f}"]
        after = [*map(str, both.counts(both.change)), f"{both.change.seconds:.3f}"]
        cells = [a if a == b else f"{a} → {b}" for a, b in zip(before, after, strict=True)]
        table.add_row(name, *cells)
    return table


def judgement_table(judgements: Sequence[Judgement]) -> Table:
    """Return the ratios with their intervals, and what each shows."""
    table = Table(
        box=None, padding=(0, 2), header_style="dim",
        title="time of the base / time of the change",
    )  # fmt: skip
    for column in ("workload", "ratio", "interval", "judgement"):
        table.add_column(column)
    for one in judgements:
        name = f"{one.workload} (target)" if one.is_target else one.workload
        interval = "" if one.interval is None else "[{:.2f}, {:.2f}]".format(*one.interval)
        style = "green" if one.holds else "yellow"
        table.add_row(name, f"{one.ratio:.2f}", interval, f"[{style}]{one.words}[/]")
    return table


def verdict(is_shown: bool, *, missing: int, passes: bool | None) -> str:
    """Return the last line: the judgement, and what is missing for it."""
    reasons = []
    if missing:
        reasons.append(f"{missing} workloads were not measured")
    if passes is False:
        reasons.append("the shared suite does not pass, or its tests were changed")
    if is_shown and passes is None:
        return "\n[bold green]shown[/], if the shared suite passes"
    said = "[bold green]shown[/]" if is_shown else "[bold yellow]not shown[/]"
    return f"\n{said}" + (f": {'; '.join(reasons)}" if reasons else "")
