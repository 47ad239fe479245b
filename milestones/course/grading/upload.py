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

from ...chain import is_elective

DEEPEST = 5  # folders around the files
LARGEST_ZIP = 200 << 20  # bytes of all files of a zip file
MOST_FILES = 20_000  # in a zip file
NOT_LOOKED_AT = re.compile(r"\.|__MACOSX|__pycache__|(common|tests|milestones|slides|m\d_\w+)$")
UNREADABLE = (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError)
NO_UPLOAD = re.compile(r"\.|__MACOSX|submission_metadata\.")


@dataclass(frozen=True)
class Upload:
    """What one student has handed in: a folder, with the name that its grade gets."""

    name: str
    folder: Path


class Uploads:
    """Finds the uploads in paths. `milestone` and `files` tell a student's work from a folder of
    many students; zip files are unpacked into `scratch`."""

    def __init__(self, milestone: str, files: Iterable[str], scratch: Path) -> None:
        self.milestone = milestone
        self.files = [*files]
        self.scratch = scratch
        self.strays: list[str] = []  # what is no upload, and why

    def find(self, paths: Iterable[Path]) -> list[Upload]:
        """Return the uploads. Raises `ValueError` if a path is missing, or there is no upload."""
        found: list[Upload] = []
        for path in paths:
            try:
                if path.is_dir() or zipfile.is_zipfile(path):
                    found += self._of_path(path)
                elif os.path.lexists(path):
                    self.strays.append(f"{readable(path.name)} is neither a folder nor a zip file")
                else:
                    raise ValueError(f"{readable(str(path))}: there is no such folder")
            except UNREADABLE as error:
                self.strays.append(f"{readable(path.name)} cannot be read: {error}")
        if not found:
            raise ValueError("\n".join(["there is no submission", *self.strays]))
        return _with_names(found)

    def _of_path(self, path: Path) -> list[Upload]:
        """Return the upload of a path, or several if it is a zip file of many students."""
        if path.is_dir():
            path = path.resolve()
            return [Upload(readable(path.name), self._inside(path))]
        folder = self._unzipped(path)
        students = self._students(folder)
        if not students:
            return [Upload(readable(path.stem), self._inside(folder))]
        return [
            Upload(
                readable(student.name.removesuffix(".zip")),
                self._inside(student if student.is_dir() else self._unzipped(student)),
            )
            for student in students
        ]

    def _students(self, folder: Path) -> list[Path]:
        """Return a folder or a zip file for each student, or nothing if there is one student."""
        inner = _entries(folder)
        while len(inner) == 1 and inner[0].is_dir() and inner[0].name != self.milestone:
            inner = _entries(inner[0])  # all is in one folder
        if any(path.name == self.milestone for path in inner):
            return []
        students = [path for path in inner if self._is_work(path)]
        only_zips = all(map(zipfile.is_zipfile, students))
        return students if len(students) > 1 or only_zips else []

    def _is_work(self, path: Path) -> bool:
        if not path.is_dir():
            return zipfile.is_zipfile(path)
        zips = any(map(zipfile.is_zipfile, path.glob("*.zip")))
        return not NOT_LOOKED_AT.match(path.name) and (zips or self._place(path) is not None)

    def _inside(self, folder: Path) -> Path:
        """Return the folder, or what is in the only zip file of a folder without other work."""
        zips = [path for path in folder.glob("*.zip") if zipfile.is_zipfile(path)]
        if len(zips) == 1 and self._place(folder) is None:
            return self._unzipped(zips[0])
        return folder

    def _place(self, folder: Path) -> Path | None:
        return place_of(folder, self.milestone, self.files)

    def _unzipped(self, path: Path) -> Path:
        """Unpack a zip file. It may come from a student, so its size is limited."""
        number = sum(1 for _ in self.scratch.iterdir())
        target = self.scratch / f"{number:05}"
        target.mkdir()
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if len(members) > MOST_FILES or size > LARGEST_ZIP:
                raise zipfile.BadZipFile(f"it has {len(members)} files of {size} bytes: too large")
            archive.extractall(target)  # removes "..", and makes no links
        return target


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not NO_UPLOAD.match(p.name))


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
            if path.name == milestone
            or not NOT_LOOKED_AT.match(path.name)
            or (is_elective(milestone) and path.name == "milestones")
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
