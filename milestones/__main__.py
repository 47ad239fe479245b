"""The console of the course: `python -m milestones bench`, `python -m milestones gpu-check`."""

from __future__ import annotations

import argparse
import sys

from . import bench, gpu_check, host_time
from .course import diff, propagate

COMMANDS = {
    "diff": (diff, "the lesson between two rungs, by symbol, with its reasons"),
    "propagate": (propagate, "for maintainers: carry an edit of a rung up the ladder"),
    "bench": (bench, "the ladder, measured on this machine"),
    "host-time": (host_time, "what a step costs beside its forward"),
    "gpu-check": (gpu_check, "kernels, engines and bandwidth on a GPU"),
}


def main() -> int:
    """Dispatch to a command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m milestones", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary))
    args = parser.parse_args()
    return COMMANDS[args.command][0].main(args)


if __name__ == "__main__":
    sys.exit(main())
