"""The handouts' pictures are of the engines as they are."""

from __future__ import annotations

from milestones.course import figures
from milestones.course.runs import load


def test_the_pictures_are_of_today() -> None:
    """Runs are the same on every machine: so are the files, byte for byte."""
    for name, text in figures.pictures(load()).items():
        on_disk = (figures.FOLDER / name).read_text(encoding="utf-8")
        assert on_disk == text, f"{name} is old: run python -m milestones.course.figures"
