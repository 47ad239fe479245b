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
from dataclasses import dataclass, replace
from pathlib import Path

from ...chain import is_elective
from .answers import escaped

DEEPEST = 5  # folders around the files
LARGEST_ZIP = 200 << 20  # bytes of all files of a zip file
MOST_FILES = 20_000  # in a zip file
MOST_LEVELS = 40  # of folders in a zip file
LONGEST_NAME = 150  # bytes
OURS = {"grades.csv"}  # in the folder of the grades
NOT_LOOKED_AT = re.compile(r"\.|__MACOSX|__pycache__|(common|tests|milestones|slides|m\d_\w+)$")
UNREADABLE = (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError)
NO_UPLOAD = re.compile(r"\.|__MACOSX|submission_metadata\.")


@dataclass(frozen=True)
class Upload:
    """What one student has handed in: a folder, with the name that its grade gets.

    `problem` is the reason why there is nothing to grade. `around`: the name of the folder in
    which the instructor has it.
    """

    name: str
    folder: Path
    problem: str = ""
    around: str = ""


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
        paths = [*paths]
        found: list[Upload] = []
        for path in paths:
            if path.is_dir():
                found.append(self._upload(path.resolve()))
            elif _is_zip(path.resolve()):
                found += self._of_zip(path, alone=len(paths) == 1)
            elif os.path.lexists(path):
                self.strays.append(f"{readable(path.name)} is neither a folder nor a zip file")
            else:
                raise ValueError(f"{readable(str(path))}: there is no such folder")
        if not found:
            raise ValueError("\n".join(["there is no submission", *self.strays]))
        return _with_names(found)

    def _upload(self, path: Path, name: str = "", *, inner: bool = True) -> Upload:
        """Return the upload in a folder or in a zip file, or in the only zip file inside it."""
        name = name or readable(path.name if path.is_dir() else path.name.removesuffix(".zip"))
        around = readable(path.absolute().parent.name)
        try:
            folder = path if path.is_dir() else self._unzipped(path)
            folder = self._inside(folder) if inner else folder
        except UNREADABLE as error:
            problem = f"{readable(path.name)} cannot be read: {error}"
            return Upload(name, path, escaped(problem), around)
        return Upload(name, folder, around=around)

    def _of_zip(self, path: Path, *, alone: bool) -> list[Upload]:
        """Return the upload of a zip file, or several if it is a download of many students.

        A student may also hand in a zip file with folders. So their names are those of students
        only if the zip file is `alone`, and otherwise begin with the name of the zip file.
        """
        upload = self._upload(path, inner=False)
        if upload.problem:
            return [upload]
        students = self._students(upload.folder)
        if not students:
            return [replace(self._upload(upload.folder, upload.name), around=upload.around)]
        if alone:
            return [self._upload(student) for student in students]
        if len(students) == 1:
            return [self._upload(students[0], upload.name)]
        uploads = [self._upload(student) for student in students]
        return [replace(one, name=f"{upload.name}-{one.name}") for one in uploads]

    def _students(self, folder: Path) -> list[Path]:
        """Return a folder or a zip file for each student, or nothing if there is one student."""
        inner = _entries(folder)
        while len(inner) == 1 and inner[0].is_dir() and inner[0].name != self.milestone:
            inner = _entries(inner[0])  # all is in one folder
        if any(path.name in (self.milestone, *self.files) for path in inner):
            return []
        work = [path for path in inner if self._is_work(path)]
        if not work or (len(work) == 1 and not _is_zip(work[0])):
            return []
        others = [p for p in inner if p.is_dir() and not NOT_LOOKED_AT.match(p.name)]
        students = [p for p in inner if p in work or (len(work) > 1 and p in others)]
        self.strays += [
            f"{readable(path.name)} is neither a folder nor a zip file"
            for path in inner
            if path not in students
        ]
        return students

    def _is_work(self, path: Path) -> bool:
        if not path.is_dir():
            return _is_zip(path)
        zips = any(map(_is_zip, path.glob("*.zip")))
        return not NOT_LOOKED_AT.match(path.name) and (zips or self._has_work(path))

    def _inside(self, folder: Path) -> Path:
        """Return the folder, or what is in the only zip file of a folder without other work."""
        zips = [path for path in folder.glob("*.zip") if _is_zip(path)]
        if not zips or self._has_work(folder):
            return folder
        if len(zips) > 1:
            raise OSError(f"it has {len(zips)} zip files, and one must be chosen")
        return self._unzipped(zips[0])

    def _has_work(self, folder: Path) -> bool:
        return bool(places_of(folder, self.milestone, self.files))

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
            if any(member.filename.count("/") > MOST_LEVELS for member in members):
                raise zipfile.BadZipFile("its folders are nested too deeply")
            archive.extractall(target)  # removes "..", and makes no links
        return target


def _is_zip(path: Path) -> bool:
    """Return whether a path is a zip file. A link could lead to the work of another student."""
    return path.is_file() and not path.is_symlink() and zipfile.is_zipfile(path)


def _entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not NO_UPLOAD.match(p.name))


def places_of(folder: Path, milestone: str, files: Iterable[str]) -> list[Path]:
    """Return the folders that may have the files of a milestone, the best one first.

    It is the folder with the milestone's name that is least deep, even if folders are around it.
    Without one, it is the folder in which most of `files` (names without a folder) are.
    """
    folders = [folder, *_below(folder, milestone)]
    named = [place for place in folders if place.name == milestone]
    named = [place for place in named if any(place.glob("*.py"))] or named
    if named:
        return named
    count = {place: sum((place / file).is_file() for file in files) for place in folders}
    most = max(count.values())
    return [place for place in folders if count[place] == most] if most else []


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
    """Return a name of a file as text that can be printed and written, even if it is not UTF-8."""
    return escaped(os.fsencode(name).decode(errors="backslashreplace"))


def _with_names(found: list[Upload]) -> list[Upload]:
    """Return uploads with different names, each of which can be the name of a folder.

    Equal names get that of the folder around them, and then a number.
    """
    names = [_name(upload.name) for upload in found]
    keys = [name.casefold() for name in names]
    taken: set[str] = set()
    result: list[Upload] = []
    for upload, name, key in zip(found, names, keys, strict=True):
        name = name if keys.count(key) == 1 else _name(f"{upload.around}-{name}")
        choice, number = name, 2
        while choice.casefold() in taken:
            choice, number = f"{name}-{number}", number + 1
        taken.add(choice.casefold())
        result.append(replace(upload, name=choice))
    return result


def _name(name: str) -> str:
    """Return a name that is not too long, and none that the grader uses itself."""
    name = name.encode()[:LONGEST_NAME].decode(errors="ignore")
    return f"submission-{name}" if not name.strip(". ") or name.casefold() in OURS else name
