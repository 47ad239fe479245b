"""Run the demo of a milestone or of an elective. `demo m5 -- --help` shows the options of one.

Exit status: that of the demo; 2 there is no such milestone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from .chain import ROOT, find_engine, package

EXAMPLE = "python -m milestones demo m3 -- --requests 4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones demo`."""
    parser.add_argument("milestone", help="m3, m3_paged, or an elective")
    parser.add_argument("options", nargs="*", help="for the demo, after --")


def main(args: argparse.Namespace) -> int:
    """Run the demo in a process of its own."""
    try:
        name = find_engine(args.milestone)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    command = [sys.executable, "-m", f"{package(name)}.demo", *args.options]
    return subprocess.run(command, cwd=ROOT).returncode
