"""The console of the course: `python -m milestones check`, `python -m milestones --help`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType

# A module is imported when its command is given: most of them need no torch, and start at once. One
# that is not there (a student's tree has only some) is no command.
COMMANDS = {
    "list": ("course.list", "the ladder: lessons, sizes, points, and how far you are"),
    "check": ("course.check", "run the exercises up to the first that fails, and say why it does"),
    "hint": ("course.hint", "the next hint of an exercise"),
    "reset": ("course.reset", "an exercise back to its starting state"),
    "doctor": ("course.doctor", "is this machine in order?"),
    "diff": ("course.diff", "the lesson between two rungs, by symbol, with its reasons"),
    "release": ("course.release", "a student's tree for a rung, without the solutions"),
    "grade": ("course.grade", "for instructors: submissions graded, each on its own"),
    "mutants": ("course.mutants", "for maintainers: do the tests catch the mistakes they are for?"),
    "propagate": ("course.propagate", "for maintainers: carry an edit of a rung up the ladder"),
    "bench": ("bench", "the ladder, measured on this machine"),
    "curves": ("curves", "what a step costs against requests, context, and what is cached"),
    "host-time": ("host_time", "what a step costs beside its forward"),
    "soak": ("soak", "attack all engines with random schedules, failures and interrupts"),
    "gpu-check": ("gpu_check", "kernels, engines and bandwidth on a GPU"),
}


def main() -> int:
    """Dispatch to a command; its exit status, 2 where the command line is wrong."""
    parser = argparse.ArgumentParser(prog="python -m milestones", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="<a command>")
    wanted = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        if importlib.util.find_spec(f"{__package__}.{module}") is None:
            continue
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == wanted:
            described = load(module)
            command.description = filled(described.__doc__ or "")
            if example := getattr(described, "EXAMPLE", None):
                command.epilog = f"for example:  {of_this_tree(example)}"
            described.add_arguments(command)
    args = parser.parse_args()
    status: int = load(COMMANDS[args.command][0]).main(args)
    return status


def of_this_tree(example: str) -> str:
    """An example, which is on m3 and m2, on a student's own rung and the one below."""
    own = [int(path.parent.name[1]) for path in Path(__file__).parent.glob("m[0-9]*/start")]
    shift = own[0] - 3 if own else 0
    return re.sub(r"\bm([23])\b", lambda rung: f"m{max(1, int(rung[1]) + shift)}", example)


def filled(text: str) -> str:
    """The paragraphs of a docstring, as wide as the terminal."""
    width = min(100, shutil.get_terminal_size().columns - 2)
    return "\n\n".join(textwrap.fill(part, width) for part in text.strip().split("\n\n"))


def load(module: str) -> ModuleType:
    """A command's module."""
    return importlib.import_module(f"{__package__}.{module}")


if __name__ == "__main__":
    sys.exit(main())
