"""Attribute the time of one step to names: a table for each lane of a trace.

The trace is a file in the Chrome format, also compressed with gzip: of `torch.profiler`
(`export_chrome_trace`), of vLLM's profiler, or of `--trace FILE` of a demo.

Nested spans count once: a name has the time of its spans without the spans inside them. A lane is a
thread of a process, and each lane has its own sum. The span of the step names nothing, so its own
time is not covered, and neither is time in which a lane has no span.

Exit status: 0 the table was shown; 2 the file is not a trace, or has no such step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...lab.instruments.chrome_spans import ChromeTrace, Part, read

EXAMPLE = "python -m milestones attribute milestones/project/step_m5.json.gz"
REFUSALS = (ValueError, OSError)
ENOUGH = 0.95  # of the step
LONGEST = 60  # characters of a name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones attribute`."""
    parser.add_argument("trace", type=Path, help="a file in the Chrome trace format")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the number of a step (default: the median one)"
    )
    parser.add_argument("--span", metavar="NAME", help="how the name of a step's span begins")
    parser.add_argument(
        "--top", type=int, default=12, metavar="N", help="rows of a lane (default: %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    """Show the table of each lane."""
    console = Console()
    trace = ChromeTrace.of(read(args.trace))
    step = trace.step(args.step, args.span)
    whole = step.end - step.start
    console.print(f"{step.name}: {whole / 1e3:.2f} ms", style="bold", highlight=False)
    for lane, parts in trace.parts(step).items():
        name = trace.names.get(lane, f"thread {lane[1]}")
        console.print(f"\n{name}" + (", with the span of the step" if lane == step.lane else ""))
        console.print(table(parts, whole, args.top))
        share = covered(parts, whole)
        console.print(
            f"covered: {share:.1%} of the step", highlight=False,
            style="green" if share >= ENOUGH else "yellow",
        )  # fmt: skip
    return 0


def covered(parts: list[Part], whole: float) -> float:
    """Return the share of a step that has a name in this lane."""
    return sum(part.time for part in parts) / whole


def table(parts: list[Part], whole: float, most: int) -> Table:
    """Return the longest parts of a lane, the sum of the others, and what has no name."""
    made = Table(box=None, padding=(0, 2), header_style="dim")
    made.add_column("name", overflow="ellipsis", no_wrap=True, max_width=LONGEST)
    for column in ("spans", "self ms", "share"):
        made.add_column(column, justify="right", no_wrap=True)
    others = parts[most:]
    rows = [(part.name, str(part.count), part.time) for part in parts[:most]]
    if others:
        count = sum(part.count for part in others)
        rows.append((f"{len(others)} more names", str(count), sum(p.time for p in others)))
    rows.append(("(no name)", "", whole - sum(part.time for part in parts)))
    for name, count_of, time in rows:
        made.add_row(name, count_of, f"{time / 1e3:.3f}", f"{time / whole:.1%}")
    return made
