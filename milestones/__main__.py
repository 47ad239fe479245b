"""The console of the course: `python -m milestones bench`."""

from __future__ import annotations

import argparse
import sys

from . import bench


def main() -> int:
    """Dispatch to a command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m milestones", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_arguments(commands.add_parser("bench", help="the ladder, measured on this machine"))
    return bench.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
