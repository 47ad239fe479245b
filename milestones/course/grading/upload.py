"""Find the files of a milestone in what a student has handed in: a tree, a folder, a zip file.

Students hand in the whole tree, only the folder of the milestone, only some files, or a zip file of
these. Canvas, Moodle and Gradescope give all submissions of an assignment as one zip file, or as a
folder when it is unpacked: it has a folder or a zip file for each student.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DEEPEST = 5  # folders around the files
LARGEST_ZIP = 200 << 20  # bytes of all files of a zip file
MOST_FILES = 20_000  # in a zip file
NOT_LOOKED_AT = re.compile(r"\.|__MACOSX|__pycache__|(common|tests|milestones|slides|m\d_\w+)$")
NO_UPLOAD = re.compile(r"\.|__MACOSX|submission_metadata\.")


@dataclass(frozen=True)
class Upload:
    """What one student has handed in: a folder, with the name that its grade gets."""

    name: str
    folder: Path


def uploads(paths: Iterable[Path], milestone: str, scratch: Path) -> tuple[list[Upload], list[str]]:
    """Return the uploads, and which paths are none. Raises `ValueError` if a path is missing."""
    found: list[Upload] = []
    strays: list[str] = []
    for path in paths:
        try:
            if path.is_dir() or zipfile.is_zipfile(path):
                found += _of_path(path, milestone, scratch)
            elif os.path.lexists(path):
                strays.append(f"{readable(path.name)} is neither a folder nor a zip file")
            else:
                raise ValueError(f"{readable(str(path))}: there is no such folder")
        except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            strays.append(f"{readable(path.name)} cannot be read: {error}")
    if not found:
        raise ValueError("\n".join(["there is no submission", *strays]))
    return _with_names(found), strays


def _of_path(path: Path, milestone: str, scratch: Path) -> list[Upload]:
    """Return the upload of a path, or several if the path has those of many students."""
    folder = path.resolve() if path.is_dir() else _unzipped(path, scratch)
    if place_of(folder, milestone, ()) is not None or path.suffix != ".zip":
        return [Upload(readable(path.stem if path.suffix == ".zip" else path.name), folder)]
    while len(inner := _entries(folder)) == 1 and inner[0].is_dir():
        folder = inner[0]  # all of the zip file is in one folder
    students = [p for p in inner if p.is_dir() or zipfile.is_zipfile(p)]
    if not any(p.is_dir() for p in students) and len(students) < len(inner):
        students = []  # some files of one student
    if not students:
        return [Upload(readable(path.stem), folder)]
    return [
        Upload(readable(p.name.removesuffix(".zip")), p if p.is_dir() else _unzipped(p, scratch))
        for p in students
    ]


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not NO_UPLOAD.match(p.name))


def _unzipped(path: Path, scratch: Path) -> Path:
    """Unpack a zip file. It may come from a student, so its size is limited."""
    number = sum(1 for _ in scratch.iterdir())
    target = scratch / f"{number:05}"
    target.mkdir()
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        if len(members) > MOST_FILES or size > LARGEST_ZIP:
            raise zipfile.BadZipFile(f"it has {len(members)} files of {size} bytes: too large")
        archive.extractall(target)  # removes "..", and makes no links
    return target


def place_of(folder: Path, milestone: str, files: Iterable[str]) -> Path | None:
    """Return the folder that has the files of a milestone, or None if there is none.

    It is the folder with the milestone's name that is least deep, even if folders are around it.
    Without one, it is the folder in which most of `files` (names without a folder) are.
    """
    folders = [folder, *_below(folder, milestone)]
    named = [place for place in folders if place.name == milestone]
    named = [place for place in named if any(place.glob("*.py"))] or named
    if named:
        return named[0]
    count = {place: sum((place / file).is_file() for file in files) for place in folders}
    best = max(folders, key=lambda place: count[place])
    return best if count[best] else None


def _below(folder: Path, milestone: str) -> list[Path]:
    """Return the folders below, the least deep first. Links are not followed."""
    found: list[Path] = []
    level = [folder]
    for _ in range(DEEPEST):
        level = [
            path
            for parent in level
            for path in _subfolders(parent)
            if path.name == milestone or not NOT_LOOKED_AT.match(path.name)
        ]
        found += level
    return found


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def readable(name: str) -> str:
    """Return a name of a file as text that can be printed and written, also if it is not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _with_names(found: list[Upload]) -> list[Upload]:
    """Return uploads with different names: equal names get that of the folder around them."""
    names = [upload.name for upload in found]
    result: list[Upload] = []
    for upload in found:
        name = upload.name
        if names.count(name) > 1:
            name = f"{readable(upload.folder.parent.name)}-{name}"
        result.append(Upload(name, upload.folder))
    names = [upload.name for upload in result]
    if len(set(names)) < len(names):
        raise ValueError(f"two submissions have the same name: {', '.join(sorted(names))}")
    return result
