"""Read `exercises.toml`, the catalog of a milestone's exercises. All other parts are made from it.

`load("m1_single")` reads and checks it. `mutants("m1_single")` reads the mistakes that its
tests must catch, from `mutants.patch`, and `wrong_solutions("m1_single")` whole solutions that are
wrong, from `wrong_solutions/*.patch`. Errors name file and entry, and are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..chain import ROOT, course_place, engines, place, short
from .catalog_checks import missing_test, problems_of_links, problems_of_table
from .delta import tomllib
from .exercise import Exercise, Mutant

HEADERS = ("Mutant", "Exercise", "Mistake", "Killed-by")


class CatalogError(ValueError):
    """The catalog is wrong. The message has a line for each problem."""


def taught_engines(root: Path = ROOT) -> list[str]:
    """Return the engines of a tree that have exercises."""
    return [name for name in engines(root) if path_of(name, root).exists()]


def path_of(milestone: str, root: Path = ROOT) -> Path:
    """Return the file of a milestone's catalog."""
    return root / course_place(milestone) / "exercises.toml"


def patches_of(milestone: str, root: Path = ROOT) -> Path:
    """Return the file of a milestone's mutants. A student's tree has no such file."""
    return root / course_place(milestone) / "mutants.patch"


def load(milestone: str, root: Path = ROOT, *, strict: bool = True) -> tuple[Exercise, ...]:
    """Return the exercises of a milestone, in order. Raises `CatalogError` with file and entry.

    Without `strict`, the files that it names are not checked: in a student's tree a
    function may be missing, and a file may have a syntax error for a while.
    """
    path = path_of(milestone, root)
    name = path.relative_to(root)
    if not path.exists():
        raise CatalogError(f"{name}: there is no such file; {milestone} has no exercises")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{name}: {error}") from error
    problems = []
    tables = document.get("exercise", [])
    if unknown := sorted(document.keys() - {"exercise"}):
        problems.append(f"unknown tables {unknown}; each entry is an [[exercise]]")
    if not isinstance(tables, list) or not tables:
        problems.append("there is no [[exercise]]")
        tables = []
    for number, table in enumerate(tables, start=1):
        problems += [
            f"{table.get('id', f'exercise {number}')}: {p}" for p in problems_of_table(table)
        ]
    exercises = () if problems else tuple(_exercise(milestone, table) for table in tables)
    problems += problems_of_links(exercises, root if strict else None)
    if problems:
        raise CatalogError("\n".join(f"{name}: {problem}" for problem in problems))
    return exercises


def find(name: str, root: Path = ROOT) -> Exercise:
    """Return the exercise with an id. Raises `CatalogError` that lists the existing ids."""
    owner, _, number = name.partition(".")
    for milestone in taught_engines(root):
        if number and owner == short(milestone):
            exercises = load(milestone, root, strict=False)
            for exercise in exercises:
                if exercise.id == name:
                    return exercise
            there = ", ".join(exercise.id for exercise in exercises)
            raise CatalogError(f"there is no exercise {name}; {milestone} has {there}")
    there = ", ".join(taught_engines(root)) or "none"
    raise CatalogError(f"there is no exercise {name!r}; the milestones with exercises: {there}")


def closure(exercise: Exercise, exercises: tuple[Exercise, ...]) -> frozenset[str]:
    """Return the ids of all exercises that an exercise needs, directly or not, without itself."""
    by_id = {other.id: other for other in exercises}
    needed: set[str] = set()
    todo = list(exercise.requires)
    while todo:
        if (name := todo.pop()) not in needed:
            needed.add(name)
            todo += by_id[name].requires
    return frozenset(needed)


def mutants(milestone: str, root: Path = ROOT) -> tuple[Mutant, ...]:
    """Return the mutants of a milestone. Raises `CatalogError` that names file, line and header."""
    path = patches_of(milestone, root)
    return _read(milestone, [path] if path.exists() else [], root)


def wrong_solutions(milestone: str, root: Path = ROOT) -> tuple[Mutant, ...]:
    """Return the wrong solutions of a milestone, in order of the exercises' files.

    A mutant shows that a test can fail. A wrong solution is what a student may write
    before seeing the tests. Raises `CatalogError`, as `mutants` does.
    """
    folder = root / course_place(milestone) / "wrong_solutions"
    return _read(milestone, sorted(folder.glob("*.patch")), root)


def _read(milestone: str, paths: Iterable[Path], root: Path) -> tuple[Mutant, ...]:
    by_id = {exercise.id: exercise for exercise in load(milestone, root)}
    found: dict[str, Mutant] = {}
    errors = []
    for path in paths:
        file = str(path.relative_to(root))
        for first, lines in _blocks(path.read_text(encoding="utf-8")):
            mutant, wrong = _mutant(milestone, lines)
            wrong += list(_mutant_problems(mutant, by_id, root)) if mutant else []
            if mutant and found.setdefault(mutant.name, mutant) is not mutant:
                wrong.append((1, f"there is another mutant {mutant.name}"))
            errors += [f"{file}:{first + n}: {what}" for n, what in wrong]
    if errors:
        raise CatalogError("\n".join(errors))
    return tuple(found.values())


def find_mutant(milestone: str, name: str, root: Path = ROOT) -> Mutant:
    """Return the mutant of a milestone with a name. Raises `CatalogError` if there is none."""
    for mutant in mutants(milestone, root):
        if mutant.name == name:
            return mutant
    raise CatalogError(f"{milestone} has no mutant {name}")


def _exercise(milestone: str, table: dict[str, Any]) -> Exercise:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return Exercise(milestone=milestone, **{"requires": (), **values})


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of each mutant in a file, with the number of lines above them."""
    lines = text.splitlines(keepends=True)
    starts = [n for n, line in enumerate(lines) if n == 0 or line.startswith(f"{HEADERS[0]}:")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield start, lines[start:end]


def _mutant(milestone: str, lines: list[str]) -> tuple[Mutant | None, list[tuple[int, str]]]:
    """Read a mutant. Returns it, or None and the errors in its headers with their lines."""
    values, wrong = [], []
    for number, header in enumerate(HEADERS, start=1):
        key, _, value = (lines[number - 1] if number <= len(lines) else "").partition(":")
        if key != header or not value.strip():
            wrong.append((number, f'this line must read "{header}: ..."'))
        values.append(value.strip())
    if not wrong and not re.fullmatch(r"[a-z0-9_]+", values[0]):
        wrong.append((1, f"the name {values[0]} must be in snake_case"))
    if len(lines) < 5 or lines[4].strip():
        wrong.append((5, "an empty line must stand between the headers and the diff"))
    if len(lines) < 7 or not lines[5].startswith(f"--- a/{place(milestone)}/"):
        wrong.append((6, f"the diff must begin with --- a/{place(milestone)}/..."))
    elif not lines[6].startswith(f"+++ b/{place(milestone)}/"):
        wrong.append((7, f"the diff must go on with +++ b/{place(milestone)}/..."))
    for number, line in enumerate(lines[7:], start=8):
        if not line.startswith((" ", "+", "-", "@", "\n")):
            wrong.append((number, f'no line of a diff, and not "{HEADERS[0]}: ..."'))
    if wrong:
        return None, wrong
    patch = "".join(lines[5:]).rstrip("\n") + "\n"
    name, exercise, mistake, killed_by = values
    return Mutant(milestone, name, exercise, mistake, killed_by, patch), []


def _mutant_problems(
    mutant: Mutant, by_id: dict[str, Exercise], root: Path
) -> Iterator[tuple[int, str]]:
    if mutant.exercise not in by_id:
        yield 2, f"there is no exercise {mutant.exercise}"
        return
    file, _, test = mutant.killed_by.partition("::")
    of_exercise = by_id[mutant.exercise].tests
    if "[" in test or not test:
        yield 4, f"{mutant.killed_by} must be the node id of a test, without parameters"
    elif mutant.killed_by not in of_exercise and file not in of_exercise:
        yield 4, f"{mutant.killed_by} is not among the tests of {mutant.exercise}"
    elif wrong := missing_test(root, mutant.killed_by):
        yield 4, wrong
