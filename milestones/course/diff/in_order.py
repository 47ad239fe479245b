"""A diff of whole files, in the order in which the lesson is read.

`diff -r` prints files in the order of the alphabet, so the lesson comes late. Here the files come
in the order of the stops in `DELTA.toml`, and the other files follow. The demo is left out, because
it only shows the lesson.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from ...chain import ROOT, below, find_engine, find_pair, own_name, sources
from .. import delta


def in_order(lower: str, upper: str, root: Path = ROOT) -> Iterator[str]:
    """Yield the lines of a unified diff between two engines, as their files are now.

    Raises `ValueError` for a name that is no engine, and if `lower` is not below `upper`.
    """
    lower, upper = find_pair(lower, upper, root)
    old, new = sources(lower, root), sources(upper, root)
    extending = {own_name(name) for name in new if own_name(name) != name}  # all lines are new
    for name in _reading_order({**old, **new}, lower, upper, root):
        before, after = None if name in extending else old.get(name), new.get(name)
        # An elective has `m5_scheduler.py` besides its own file, and takes other files as they are.
        if own_name(name) != name or before == after:
            continue
        yield from difflib.unified_diff(
            _lines(before),
            _lines(after),
            _label(before, root),
            _label(after, root),
            lineterm="",
        )


def lower_of(upper: str, root: Path = ROOT) -> str:
    """Return the milestone directly below one. Raises `ValueError` for the lowest."""
    lower = below(find_engine(upper, root), root)
    if lower is None:
        raise ValueError(f"{upper} is the lowest milestone; name two")
    return lower


def _reading_order(files: dict[str, Path], lower: str, upper: str, root: Path) -> list[str]:
    """Return the names of the files: those of the first stop first, and those of no stop last."""
    stops = delta.declared(upper, root).stops if below(upper, root) == lower else {}
    of_stops = [entry.partition(":")[0] for entries in stops.values() for entry in entries]
    first = [name for name in dict.fromkeys(of_stops) if name in files]
    rest = [name for name in sorted(files) if name not in first]
    return [name for name in (*first, *rest) if not name.startswith("demo/")]


def _lines(path: Path | None) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path else []


def _label(path: Path | None, root: Path) -> str:
    return path.relative_to(root).as_posix() if path else "/dev/null"
