"""The picture of a title slide: all engines as stacks of files, with what this lesson changes."""

from __future__ import annotations

from milestones.chain import below, is_elective, milestones, own_name, short, sources
from milestones.course.delta import declared
from milestones.drawing.svg import text

from .svg import WIDTH, picture, rect

HEIGHT = 262.0  # pixels, of the highest stack


def ladder(name: str = "") -> str:
    """Draw a stack of files for each milestone, and one more for an elective.

    name: the engine of this lecture. Its files are new, changed or as below. Without it, all are.
    """
    names = [*milestones(), *([name] if name and is_elective(name) else [])]
    stacks = {engine: stack(engine) for engine in names}
    pitch, file = WIDTH / len(names), min(18.0, HEIGHT / max(map(len, stacks.values())))
    bottom, parts = file * max(map(len, stacks.values())), list[str]()
    reached = names.index(name) if name else len(names)
    for column, (engine, kinds) in enumerate(stacks.items()):
        for row, kind in enumerate(kinds):
            y = bottom - (row + 1) * file
            shown = kind if engine == name or not name else "frame"
            shown = "idle" if column > reached else shown
            parts.append(rect(column * pitch, y, pitch - 28, file - 4, shown, 2))
        ink = "strong forward-ink" if engine == name else "strong" if column < reached else "soft"
        parts.append(text(column * pitch, bottom + 24, short(engine), ink, 23))
    return picture(WIDTH, bottom + 34, parts, f"The files of the engines, and of {name or 'all'}")


def stack(engine: str) -> list[str]:
    """Return the kinds of an engine's files, from the bottom: as below, changed, new."""
    files = {own_name(file) for file in sources(engine) if "/" not in file} - {"__init__.py"}
    if below(engine) is None:
        return ["forward"] * len(files)
    delta = declared(engine)
    touched = {entry.partition(":")[0] for entry in delta.added | delta.changed}
    kinds = [
        "forward" if file in delta.added else "box changed" if file in touched else "frame"
        for file in files
    ]
    return sorted(kinds, key=("frame", "box changed", "forward").index)
