"""`python -m slides`: build the decks, or record the runs that they show."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m slides", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build and check the decks as HTML and PDF")
    build.add_argument("decks", nargs="*", help="build only these decks, for example m2")
    build.add_argument("--html-only", action="store_true", help="no browser: no checks and no PDF")
    record = commands.add_parser("record", help="run the engines and write slides/data/")
    record.add_argument("names", nargs="*", help="record only these runs, for example m2_example")
    shots = commands.add_parser("shots", help="save a picture of every slide")
    shots.add_argument("decks", nargs="*")
    shots.add_argument("--theme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    if args.command == "record":
        from .record import RUNS  # This import needs torch. Building does not.
        from .record import record as record_run

        for name in args.names or RUNS:
            sys.stderr.write(f"recording {name}\n")
            record_run(name)
        return 0
    from . import build as builder

    return builder.main(args)


if __name__ == "__main__":
    sys.exit(main())
