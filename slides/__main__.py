"""`python -m slides`: build the decks, or record the runs that they show."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m slides", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="every deck to HTML and PDF, checked in a browser")
    build.add_argument("decks", nargs="*", help="only these, for example m2")
    build.add_argument("--html-only", action="store_true", help="no browser: no checks, no PDF")
    record = commands.add_parser("record", help="run the engines, write slides/data/")
    record.add_argument("names", nargs="*", help="only these, for example m2_example")
    shots = commands.add_parser("shots", help="every slide as a picture")
    shots.add_argument("decks", nargs="*")
    shots.add_argument("--theme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    if args.command == "record":
        from .record import RECORDS  # needs torch, building does not
        from .record import record as record_run

        for name in args.names or RECORDS:
            sys.stderr.write(f"recording {name}\n")
            record_run(name)
        return 0
    from . import build as builder

    return builder.main(args)


if __name__ == "__main__":
    sys.exit(main())
