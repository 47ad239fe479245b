"""Which packages lie below an engine, in order, and where the files of an engine are.

All parts of the project ask this file. The chain of an engine has all engines below it and ends
with the engine itself. It names the lessons that the engine contains.

A milestone is a complete package. An elective is one more lesson on top of the highest milestone,
or on top of another elective (`STANDS_ON`). Its package holds only what differs from the package
below, and takes all else from there, so it is a complete engine too: see
`milestones/electives/__init__.py`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
MILESTONE = re.compile(r"m\d_\w+")
ELECTIVES = "milestones/electives"
STANDS_ON = {"agents": "priority"}  # electives that lie on another elective
EXTENDED = re.compile(rf"^(?:m\d|{'|'.join(STANDS_ON.values())})_")  # see `extended`


def milestones(root: Path = ROOT) -> list[str]:
    """Return the milestones of a tree, from the lowest to the highest."""
    return sorted(path.name for path in root.iterdir() if MILESTONE.fullmatch(path.name))


def electives(root: Path = ROOT) -> list[str]:
    """Return the electives of a tree, in the order of the alphabet."""
    return sorted(path.parent.name for path in (root / ELECTIVES).glob("*/__init__.py"))


def engines(root: Path = ROOT) -> list[str]:
    """Return the milestones of a tree, and then its electives."""
    return [*milestones(root), *electives(root)]


def parents(root: Path = ROOT) -> dict[str, str | None]:
    """Return the package directly below each engine, or None for the lowest one."""
    names = milestones(root)
    ladder = dict(zip(names, [None, *names], strict=False))
    top = names[-1] if names else None
    return {**ladder, **{name: STANDS_ON.get(name, top) for name in electives(root)}}


def below(name: str, root: Path = ROOT) -> str | None:
    """Return the package directly below an engine, or None for the lowest one."""
    return parents(root)[name]


def chain(name: str, root: Path = ROOT) -> list[str]:
    """Return the packages from the lowest one up to `name`."""
    parent_of, found = parents(root), [name]
    while (parent := parent_of[found[-1]]) is not None:
        found.append(parent)
    return found[::-1]


def above(name: str, root: Path = ROOT) -> list[str]:
    """Return the packages that have `name` below them, lower ones first."""
    return [other for other in parents(root) if at_least(other, name, root) and other != name]


def at_least(name: str, milestone: str, root: Path = ROOT) -> bool:
    """Return whether an engine is this milestone, or has it below."""
    return milestone in chain(name, root)


def is_elective(name: str) -> bool:
    """Return whether a name is that of an elective, and not of a milestone."""
    return MILESTONE.fullmatch(name) is None


def short(name: str) -> str:
    """Return a milestone's name up to the first "_". The short name of an elective is its name."""
    return name if is_elective(name) else name.partition("_")[0]


def find_engine(name: str, root: Path = ROOT) -> str:
    """Return the engine with a name: m1, m1_single, or an elective. Raises `ValueError`."""
    for milestone in engines(root):
        if name in (milestone, short(milestone)):
            return milestone
    there = ", ".join(engines(root))
    raise ValueError(f"there is no milestone {name!r}; there are {there}")


def find_pair(lower: str, upper: str, root: Path = ROOT) -> tuple[str, str]:
    """Return two engines with these names. Raises `ValueError` if one is not below the other."""
    lower, upper = find_engine(lower, root), find_engine(upper, root)
    if lower not in chain(upper, root)[:-1]:
        raise ValueError(f"{lower} is not below {upper}; name the lower milestone first")
    return lower, upper


def place(name: str) -> str:
    """Return the folder of an engine's own sources, from the root."""
    return f"{ELECTIVES}/{name}" if is_elective(name) else name


def course_place(name: str) -> str:
    """Return the folder of an engine's page, exercises, mutants and DELTA.toml, from the root."""
    return f"{ELECTIVES}/{name}" if is_elective(name) else f"milestones/{name}"


def package(name: str) -> str:
    """Return the name by which an engine is imported."""
    return place(name).replace("/", ".")


def load(name: str, module: str = "") -> ModuleType:
    """Import an engine, or one of its modules, such as `scheduler`."""
    return importlib.import_module(f"{package(name)}.{module}" if module else package(name))


def sources(name: str, root: Path = ROOT) -> dict[str, Path]:
    """Return the Python files of a complete engine, by name inside its package.

    An elective has its own version of some files, and those of the package below for the others.
    """
    folder, under = root / place(name), below(name, root)
    own = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    if not is_elective(name) or under is None:
        return own
    return dict(sorted({**sources(under, root), **own, **extended(name, root)}.items()))


def own_name(file: str) -> str:
    """Return the name that a file has in its package: `scheduler.py` for `m5_scheduler.py`."""
    return EXTENDED.sub("", file)


def extended(name: str, root: Path = ROOT) -> dict[str, Path]:
    """Return the files of lower packages that an elective's own files extend, by their names there.

    If the elective's `scheduler.py` extends the milestone's, this is `m5_scheduler.py` in the
    elective, and no file of that name exists: see `milestones/electives/__init__.py`. On another
    elective, what that one extends is here too, lower packages first.
    """
    under = below(name, root)
    if not is_elective(name) or under is None:
        return {}
    found = extended(under, root)
    for path in sorted((root / place(name)).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for lower in chain(under, root):
            module = f"{short(lower)}_{path.stem}"
            if f"from .{module} import" in text:
                found[f"{module}.py"] = root / place(lower) / path.name
    return found


def extending(old: dict[str, Path], new: dict[str, Path]) -> set[str]:
    """Return the names of the files that extend a file in `new`, and do not yet in `old`.

    old, new: the sources of an engine, and of one above it. All lines of these files are new.
    """
    return {own_name(file) for file in new.keys() - old.keys() if own_name(file) != file}
