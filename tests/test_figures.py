"""The pictures in the handouts show what the engines do now."""

from __future__ import annotations

from milestones.course.maintain import figures
from milestones.course.maintain.runs import load


def test_the_pictures_are_of_today() -> None:
    """A run is the same on every machine, so the files are equal byte for byte."""
    for name, text in figures.pictures(load()).items():
        on_disk = (figures.FOLDER / name).read_text(encoding="utf-8")
        assert on_disk == text, f"{name} is old: run python -m milestones.course.maintain.figures"
