"""`release m3 DIR`: write a student's tree for a milestone, with the solutions cut out.

Exit status: 0 the tree was written; 1 it could not be (DIR is not empty, or a catalog is wrong).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from ...chain import course_place, find_engine, package, place
from ..catalog import load
from ..delta import ROOT, tomllib
from ..exercise import Exercise
from ..student.failure_words import INVARIANTS
from ..student.list import lesson
from .cut import Cut
from .student_tree import Files, student_files

EXAMPLE = "python -m milestones release m3 ~/m3-assignment"
TEMPLATES = Path(__file__).parent / "templates"
IGNORED = ".venv/\n__pycache__/\n*.pyc\n.*_cache/\n.hypothesis/\n.ladder/\n*.bak\n*.bak.*\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones release`."""
    parser.add_argument("milestone", help="the milestone of the assignment: m3 or m3_paged")
    parser.add_argument("directory", type=Path, help="a new or empty folder")


def main(args: argparse.Namespace) -> int:
    """Write the tree and show what is in it."""
    console = Console()
    try:
        milestone = find_engine(args.milestone)
        done = release(milestone, args.directory)
    except (ValueError, ReleaseError) as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        return 1
    exercises = load(milestone)
    points = sum(exercise.points for exercise in exercises)
    said = f"{args.directory}: {milestone}, {len(exercises)} exercises, {points} points"
    console.print(said, highlight=False, soft_wrap=True)
    for name in done.removed:
        console.print(
            f"removed, because only solutions used it: {name}", highlight=False, soft_wrap=True
        )
    return 0


class ReleaseError(Exception):
    """The tree cannot be written. The message says why."""


def release(milestone: str, directory: Path, root: Path = ROOT) -> Cut:
    """Write a student's tree for a milestone into `directory`, completely or not at all."""
    directory = directory.expanduser().resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ReleaseError(
            f"{directory} is not empty, and release overwrites nothing: name a new one"
        )
    if root.resolve() in [directory, *directory.parents]:
        raise ReleaseError(f"{directory} is inside the course's folder: name one outside {root}")
    files, done = student_files(milestone, root)
    files |= own_pages(milestone, load(milestone, root), root)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        for name, data in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        make_repository(partial, milestone)
        partial.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return done


def own_pages(milestone: str, exercises: tuple[Exercise, ...], root: Path) -> Files:
    """Return README.md, AGENTS.md, Makefile and .gitignore of the tree."""
    rows = ["| exercise | what you build | needs | points | hours |", "|---|---|---|---|---|"]
    rows += [
        f"| [{e.id} {e.title}]({e.section}) | {e.summary} | {', '.join(e.requires) or 'none'} "
        f"| {e.points} | {e.hours:g} |"
        for e in exercises
    ]
    symbols = [f"`{place(e.milestone)}/{symbol}`" for e in exercises for symbol in e.symbols]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    values = {
        "milestone": milestone,
        "place": place(milestone),
        "course": course_place(milestone),
        "package": package(milestone),
        "version": project["version"],
        "lesson": lesson(milestone, root),
        "first": exercises[0].id,
        "exercises": "\n".join(rows),
        "symbols": ", ".join(symbols),
        "invariants": "\n".join(
            f"- **I{number} {name}.** {text}" for number, (name, text) in INVARIANTS.items()
        ),
    }
    pages: Files = {".gitignore": IGNORED.encode()}
    for template in sorted(TEMPLATES.glob("*.in")):
        text = re.sub(r"\{\{(\w+)\}\}", lambda m: values[m[1]], template.read_text("utf-8"))
        pages[template.stem] = text.encode()
    return pages


def make_repository(folder: Path, milestone: str) -> None:
    """Make a Git repository with one commit. Without Git, the tree is complete all the same."""
    git = shutil.which("git")
    if git is None:
        return
    name, email = "LLM Ladder", "course@llm-ladder.invalid"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": name, f"GIT_{who}_EMAIL": email}
    for arguments in (
        ("init", "-q"),
        ("symbolic-ref", "HEAD", "refs/heads/main"),
        ("add", "-A"),
        ("commit", "-q", "-m", f"The assignment: {milestone}"),
    ):
        done = subprocess.run(
            [git, "-C", str(folder), *arguments], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.strip()}")
