"""Collect the files of a student's tree, by path. Cut the solutions, and remove dead references.

The tree has `common/`, the milestones up to the released one with their pages and exercises, the
part of the console that a student uses, and the tests that run on these milestones. All that refers
to a milestone above is removed: a test for it, a mark that names it, a link to its page.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ...chain import below, chain, course_place, electives, engines, milestones, place, short
from ..catalog import load
from ..exercise import Exercise
from ..student.list import size_of
from .cut import Cut, cut
from .pages import fitting, folders_of
from .student_tests import chosen_tests, naming

# The modules of the commands that a student uses, besides all of `course/student/`. Some commands
# start a server of tests.
STARTED = (
    "course/diff/command.py", "course/testing/server.py", "demo.py", "lab/bench/gpu_check.py",
    "lab/bench/host_time.py", "lab/instruments/path_of_a_token.py",
)  # fmt: skip
AS_THEY_ARE = (
    "LICENSE", "requirements.txt", "constraints.txt", "ARCHITECTURE.md",
    "milestones/docs/GLOSSARY.md", "milestones/docs/INSIDE.md", "milestones/docs/QUESTIONS.md",
    "milestones/docs/WHERE.md",
    "milestones/course/diff/lesson.css", "milestones/course/diff/lesson_code.css",
    "milestones/course/diff/lesson.html",
)  # fmt: skip
ELECTIVE_FILES = ("milestones/electives/__init__.py", "milestones/electives/demos.py")
LEFT_OUT = re.compile(
    r"(__pycache__|\.\w+_cache|mutants\.patch|wrong_solutions|\.DS_Store)(/|$)|\.pyc$"
)

Files = dict[str, bytes]


def student_files(milestone: str, root: Path) -> tuple[Files, Cut]:
    """Return a student's files, without the pages that a release writes, and what was cut."""
    kept = chain(milestone, root)
    absent = set(engines(root)) - set(kept)
    files = _sources(root, kept, milestone)
    files |= chosen_tests(root, kept, absent)
    files |= _console(root, files, absent)
    exercises = load(milestone, root)
    done = cut(milestone, exercises, root, told(milestone, exercises, files))
    for path, text in done.files.items():
        files[path] = text.encode()
    for path in {source for exercise in exercises for source in exercise.sources}:
        name = path.removeprefix(f"{place(milestone)}/")
        files[f"{course_place(milestone)}/start/{name}.txt"] = files[path]
    size = size_of(root, milestone, below(milestone, root))
    files[f"{course_place(milestone)}/start/size.json"] = json.dumps(asdict(size)).encode()
    delta = f"{course_place(milestone)}/DELTA.toml"
    if delta in files:
        removed = [name.removeprefix(f"{place(milestone)}/") for name in done.removed]
        files[delta] = without_entries(files[delta].decode(), removed).encode()
    for path in files:
        if path.endswith(".md"):
            files[path] = fitting(path, files[path].decode(), files, done.files).encode()
    return files, done


def told(milestone: str, exercises: Iterable[Exercise], files: Files) -> str:
    """Return all text, besides the sources, in which a student can read the name of a helper."""
    others = re.compile(
        rf"tests/exercises/test_(?!{short(milestone)}_)\w+_\d+\.py|m\d_\w+/|{place(milestone)}/.*\.py"
        r"|milestones/(lab/\w+/|\w+/)?\w+\.py|.*/DELTA"
    )
    pages = re.compile(rf"milestones/(?!{milestone}/)m\d_\w+/")
    return "\n".join(
        data.decode(errors="replace")
        for path, data in files.items()
        if not others.match(path) and not pages.match(path)
    )


def without_entries(text: str, symbols: Iterable[str]) -> str:
    """Return a DELTA.toml without some symbols, in its tables and its stops."""
    symbols = list(symbols)
    kept = [
        line
        for line in text.splitlines()
        if not any(line.startswith(f'"{symbol}" =') for symbol in symbols)
    ]
    text = "\n".join(kept) + "\n"
    for symbol in symbols:
        text = re.sub(rf'\s*"{re.escape(symbol)}",?', "", text)
    return text


def _sources(root: Path, kept: list[str], milestone: str) -> Files:
    """Return all files except tests and the console."""
    files: Files = {}
    folders = ["common", *map(place, kept), *map(course_place, kept)]
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not LEFT_OUT.search(name):
                files[name] = path.read_bytes()
    of_electives = ELECTIVE_FILES if milestone in electives(root) else ()
    for name in (*AS_THEY_ARE, *of_electives):
        if (root / name).is_file():
            files[name] = (root / name).read_bytes()
    # Tools must not be told to check folders that the tree does not have.
    config = (root / "pyproject.toml").read_text(encoding="utf-8")
    for absent in {*milestones(root), "slides"} - set(kept):
        config = config.replace(f'"{absent}", ', "")
    files["pyproject.toml"] = config.encode()
    return files


def _console(root: Path, files: Files, absent: set[str]) -> Files:
    """Return the modules of `milestones/` that a student's commands and tests need, without those
    that name a milestone above."""
    found: Files = {}
    student = sorted((root / "milestones/course/student").glob("*.py"))
    todo = ["__main__.py", *STARTED, *(f"course/student/{path.name}" for path in student)]
    for name, data in files.items():
        if name.startswith("tests/"):
            for module in re.findall(r"milestones\.(\w[\w.]*\w)", data.decode()):
                todo += [f"{module.replace('.', '/')}.py"]
    while todo:
        name = posixpath.normpath(todo.pop())
        path = root / "milestones" / name
        if f"milestones/{name}" in found or not path.is_file():
            continue
        source = path.read_text(encoding="utf-8")
        if re.search(naming(absent), source):
            continue
        found[f"milestones/{name}"] = source.encode()
        todo += [*_imported(name, source), "__init__.py"]
        todo += [f"{folder}/__init__.py" for folder in folders_of(name)]
    return found


def _imported(name: str, source: str) -> list[str]:
    """Return the files that a module of `milestones/` may import relatively."""
    files = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            up = [".."] * (node.level - 1)
            module = (node.module or "").split(".")
            folder = posixpath.join(posixpath.dirname(name), *up, *module)
            files += [f"{folder}.py", *(f"{folder}/{alias.name}.py" for alias in node.names)]
    return files
