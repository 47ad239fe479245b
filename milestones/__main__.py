"""The console of the course. `python -m milestones check --help` explains the command `check`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType

CLOSED_PIPE = 141  # as a shell reports a program that a closed pipe has ended: 128 + SIGPIPE

# A module is imported only when its command is given. Most commands do not need torch, so they
# start at once. A student's tree has only some of the modules, and only their commands.
Command = tuple[str, str]  # the module, and a summary
GROUPS: dict[str, dict[str, Command]] = {
    "for students": {
        "list": ("course.student.list", "show all milestones: lessons, sizes and your progress"),
        "check": (
            "course.student.check",
            "run the exercises up to the first that fails, and say why it fails",
        ),
        "read": ("course.student.read", "read an exercise of the handout, with its answers folded"),
        "hint": ("course.student.hint", "show the next hint of an exercise"),
        "predict": ("course.student.predict", "write down a prediction, then read the answer"),
        "break": (
            "course.student.break_it",
            "make the mistake of a Break it, and see which tests and answers change",
        ),
        "lanes": ("course.student.lanes", "diagnose the timelines of m5 from their lanes"),
        "museum": ("course.museum.command", "find the bug in a run: eight bugs of other projects"),
        "measure": ("course.student.measure", "measure what a milestone is about, in one table"),
        "attribute": (
            "course.project.attribute",
            "say where the time of a step goes: a table from a trace",
        ),
        "project": ("course.project.command", "compare your project with its base, and judge it"),
        "reset": ("course.student.reset", "put an exercise back to its starting state"),
        "diff": (
            "course.diff.command",
            "show what a lesson changes, by symbol, with a reason for each change",
        ),
        "demo": ("demo", "run the demo of a milestone or of an elective"),
        "doctor": ("course.student.doctor", "check this machine: packages, model, disk, kernels"),
        "extras": ("extras", "install the packages of an optional part: the server"),
    },
    "for instructors": {
        "release": (
            "course.release.command",
            "make a student's tree for a milestone, without the solutions",
        ),
        "grade": ("staff.grading.command", "grade submissions"),
        "serve": ("serving.serve", "serve a milestone with OpenAI's HTTP interface"),
        "load": (
            "serving.load.command",
            "send requests to a server at several rates; show the latencies",
        ),
        "scale": ("serving.scale.command", "measure and simulate replicas behind a router"),
        "bench": ("lab.bench.command", "measure all milestones on this machine"),
        "curves": (
            "lab.bench.curves",
            "measure how a step grows with requests, context and cached prompts",
        ),
    },
    "for maintainers": {
        "host-time": ("lab.bench.host_time", "measure the host's share of a step"),
        "soak": (
            "lab.soak.command",
            "attack all engines with random schedules, failures and interrupts",
        ),
        "gpu-check": ("lab.bench.gpu_check", "check kernels, engines and bandwidth on a GPU"),
        "mutants": ("staff.maintain.mutants", "check that the tests catch known mistakes"),
        "propagate": ("staff.maintain.propagate", "apply an edit to the milestones above"),
        "site": ("book.command", "make the book, a web site in which the engines run"),
        "types": ("staff.maintain.types", "check the types, with complete electives"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main() -> int:
    """Run the command of the command line. Return its exit status, 2 for wrong usage."""
    if importlib.util.find_spec("rich") is None:
        sys.stderr.write("this Python lacks the course's packages: `. .venv/bin/activate` first\n")
        return 2
    parser = argparse.ArgumentParser(
        prog="python -m milestones", description=__doc__, epilog=listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="<a command>")
    wanted = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    for name, (module, _) in COMMANDS.items():
        if not is_there(module):
            continue
        subparser = commands.add_parser(name, formatter_class=parser.formatter_class)
        if name == wanted:
            described = load(module)
            subparser.description = filled(described.__doc__ or "")
            if example := getattr(described, "EXAMPLE", None):
                subparser.epilog = f"for example:  {of_this_tree(example)}"
            described.add_arguments(subparser)
    args = parser.parse_args()
    command = load(COMMANDS[args.command][0])
    try:
        status: int = command.main(args)
        sys.stdout.flush()
    except getattr(command, "REFUSALS", ()) as error:  # the message says what is wrong
        sys.stderr.write(f"{error}\n")
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return CLOSED_PIPE
    return status


def listed() -> str:
    """Return the commands of this tree, in groups."""
    lines = []
    for group, commands in GROUPS.items():
        there = {name: summary for name, (module, summary) in commands.items() if is_there(module)}
        if there:
            lines += [f"{group}:", *(f"    {name:10} {there[name]}" for name in there), ""]
    return "\n".join(lines)


def is_there(module: str) -> bool:
    """Return whether this tree has the module of a command."""
    path = Path(__file__).parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def of_this_tree(example: str) -> str:
    """Return an example for m3 and m2 with the student's own milestone and the one below."""
    own = [int(path.parent.name[1]) for path in Path(__file__).parent.glob("m[0-9]*/start")]
    shift = own[0] - 3 if own else 0
    return re.sub(r"\bm([23])\b", lambda name: f"m{max(1, int(name[1]) + shift)}", example)


def filled(text: str) -> str:
    """Return a docstring with its paragraphs filled to the width of the terminal."""
    width = min(100, shutil.get_terminal_size().columns - 2)
    return "\n\n".join(textwrap.fill(part, width) for part in text.strip().split("\n\n"))


def load(module: str) -> ModuleType:
    """Import and return the module of a command."""
    return importlib.import_module(f"{__package__}.{module}")


if __name__ == "__main__":
    sys.exit(main())
