"""Attack all engines with random schedules, and check every answer.

Requests arrive at random steps. They share prefixes, use sampling, stop strings and streams, and
some are aborted or refused.
Pools are barely large enough. Forwards, logits and texts fail. Ctrl-C and timers interrupt calls.
Every answer must be the expected one, no request may be lost or stuck, and no memory may be left
behind. The command prints each schedule that fails, with the command that runs it again.
milestones/docs/SOAK.md explains the figures.

Exit status: 0 all answers and invariants were right; 1 a problem was found; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console

from ...chain import engines, find_engine, milestones
from ...console import wide_console
from . import results
from .matrix import FaultMatrix
from .parts import PARTS
from .results import Results
from .runner import Soak

EXAMPLE = "python -m milestones soak --minutes 10 --milestone m3"
MOST_FAILED_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones soak`."""
    parser.add_argument("--minutes", type=float, default=1.0, help="time of the run (default: 1)")
    parser.add_argument(
        "--schedules", type=int, metavar="N", help="N schedules per milestone, instead of --minutes"
    )
    parser.add_argument(
        "--milestone",
        action="append",
        help="m3, m3_paged, an elective, or all; may be repeated (default: all milestones)",
    )
    parser.add_argument("--seed", type=int, help="seed of the run (default: random, printed)")
    parser.add_argument("--schedule", type=int, metavar="K", help="run only schedule K of a seed")
    parser.add_argument(
        "--no-interrupts", action="store_true", help="the same seed then gives exactly the same run"
    )
    parser.add_argument(
        "--faults", nargs="*", metavar="PART",
        help="let these parts of a step fail (default: each part), and show what happens",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that share the schedules (default: 1)"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the figures into this page"
    )


def main(args: argparse.Namespace) -> int:
    """Run, print the figures, and print the command that repeats each failed schedule."""
    console = wide_console()
    try:
        wanted = engines() if args.milestone == ["all"] else args.milestone or milestones()
        names = [find_engine(name) for name in wanted]
        if args.schedule is not None and args.seed is None:
            raise ValueError("--schedule also needs the --seed of its run")
        if unknown := set(args.faults or ()) - {*PARTS}:
            raise ValueError(f"--faults: {unknown} is none of {', '.join(PARTS)}")
    except ValueError as error:
        console.print(str(error), style="red")
        return 2
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    console.print(f"seed {seed}: {', '.join(names)}", style="dim")
    if args.faults is None:
        soak = Soak(seed, names, interrupts=not args.no_interrupts)
    else:
        soak = FaultMatrix(seed, names, args.faults)
    started = time.monotonic()
    found = _run(args, soak, console)
    minutes = (time.monotonic() - started) / 60
    console.print(results.table(found, f"soak, seed {seed}, {minutes:.1f} minutes"))
    for failed in found.failed[:MOST_FAILED_SHOWN]:
        where = f"{failed.milestone} {failed.mode}".strip()
        console.print(f"{where}: {failed.message}\n    {failed.command}")
    if len(found.failed) > MOST_FAILED_SHOWN:
        console.print(f"and {len(found.failed) - MOST_FAILED_SHOWN} more")
    for leak in found.leaks:
        console.print(leak)
    if args.report:
        results.write_page(args.report, found, seed, minutes, args.jobs)
    return 1 if found.failed or found.leaks else 0


def _run(args: argparse.Namespace, soak: Soak, console: Console) -> Results:
    """Run in this process, or in several that share the schedules."""
    if args.schedule is not None:
        return share(soak, [args.schedule], None, console)
    seconds = None if args.schedules else 60 * args.minutes
    numbers = [
        range(job, args.schedules, args.jobs) if args.schedules else itertools.count(job, args.jobs)
        for job in range(args.jobs)
    ]
    if args.jobs == 1:
        return share(soak, numbers[0], seconds, console)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(share, soak, n, seconds) for n in numbers]:
            soak.results.merge(done.result())
    return soak.results


def share(
    soak: Soak, numbers: Iterable[int], seconds: float | None, console: Console | None = None
) -> Results:
    """Run these schedules, for at most `seconds` seconds, and return the counts."""
    torch.set_num_threads(1)  # the models are tiny, and more threads would only slow them down
    with (console or Console(quiet=True)).status("starting") as status:
        for number in soak.run(_within(numbers, seconds)):
            requests = sum(tally.requests for tally in soak.results.lanes.values())
            status.update(
                f"schedule {number}: {requests:,} requests, {len(soak.results.failed)} failed"
            )
    soak.measure_memory()
    return soak.results


def _within(numbers: Iterable[int], seconds: float | None) -> Iterator[int]:
    """Yield these numbers until the time is over."""
    end = None if seconds is None else time.monotonic() + seconds
    return itertools.takewhile(lambda _: end is None or time.monotonic() <= end, numbers)
