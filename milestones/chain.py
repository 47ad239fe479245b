"""Which packages lie below an engine, in order. All parts of the project ask this file.

The chain of a milestone has all milestones below it and ends with the milestone itself. It names
the lessons that the engine contains.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MILESTONE = re.compile(r"m\d_\w+")


def milestones(root: Path = ROOT) -> list[str]:
    """Return the milestones of a tree, from the lowest to the highest."""
    return sorted(path.name for path in root.iterdir() if MILESTONE.fullmatch(path.name))


def parents(root: Path = ROOT) -> dict[str, str | None]:
    """Return the package directly below each engine, or None for the lowest one.

    An elective will be one more entry here, with its milestone as the value.
    """
    names = milestones(root)
    return dict(zip(names, [None, *names], strict=False))


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
