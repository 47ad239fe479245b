"""`scale`: measure and simulate replicas behind the router. SCALING.md explains the results.

simulate: hit rate and load of up to 256 replicas, in virtual time. measure: real replicas, each
policy in one run, beside the simulator. kill: SIGKILL for replicas under load. ranks: one process
and tensor parallelism, in paired runs. steps: the step model of the simulator, from the recorded
results. page: the tables of SCALING.md. Exit status: 1 if a stream had no end or two answers; 2 for
missing packages.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ... import recording
from ...console import wide_console
from ...extras import missing
from . import ranks
from .page import PAGE, on_screen, simulated_rows, with_tables
from .simulation import points
from .steps import MEASURED, load_steps, measured_steps

EXAMPLE = "python -m milestones scale simulate --replicas 2,4,16,64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones scale`."""
    parser.add_argument("what", choices=("simulate", "measure", "kill", "ranks", "steps", "page"))
    parser.add_argument("--replicas", type=_sizes, default=(), metavar="N,N,...",
                        help="simulate: 2,4,16,64,256; measure: 2,4; kill: 2")  # fmt: skip
    parser.add_argument("--requests", type=int, default=300, metavar="N",
                        help="simulate: requests for each replica (300)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3,
                        help="measure: runs of each policy; ranks: of each side (3)")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks: how many (2)")
    parser.add_argument("--times", type=int, default=20, help="kill: how often (20)")
    parser.add_argument("--milestone", default="m5_overlap", help="of real replicas (m5_overlap)")
    parser.add_argument("--model", default="tiny-llama", help="of real replicas (tiny-llama)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")


def main(args: argparse.Namespace) -> int:
    """Run what the command line asks for."""
    console = wide_console()
    if args.what == "steps":
        recording.write(MEASURED, measured_steps())
        return 0
    if args.what == "page":
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    is_wrong = False
    if args.what == "simulate":
        found = _simulate(args, console)
    elif args.what == "ranks":
        found = ranks.measure(args, console)
    else:
        if lines := [line for extra in ("serve", "scale") if (line := missing(extra))]:
            console.print(lines[0], style="red")
            return 2
        from .serve import prepare

        prepare(None)
        from . import real

        found = (real.measure if args.what == "measure" else real.kill)(args, console)
        is_wrong = not real.ENDS.issuperset(found.get("streams", ()))
    if args.json:
        recording.write(args.json, found)
    return 1 if is_wrong else 0


def _simulate(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    steps, found = load_steps(), list[dict[str, Any]]()
    for one in points(steps, args.replicas or (2, 4, 16, 64, 256), args.requests):
        found.append(asdict(one))
        console.print(f"{one.policy}, {one.replicas} replicas: hit rate {one.hit_rate:.2f}")
    title = f"Simulated replicas, with steps as measured on {steps.machine}"
    console.print(on_screen(title, simulated_rows(found)))
    return {"step model": steps.machine, "points": found}


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"numbers of replicas: 2,4,16; got {text!r}")
    return sizes
