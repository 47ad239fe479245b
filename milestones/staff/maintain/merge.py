"""Three-way merges of one file of a milestone, with `git merge-file` and without Git's index."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...chain import place
from ...course.outline import MODULE, symbol_at

BEGIN, MIDDLE, END = "<<<<<<< ", "=======\n", ">>>>>>> "  # Git's conflict markers


@dataclass(frozen=True)
class Step:
    """What happens to one file of one milestone.

    kind: same (copied), merged, created, deleted, unchanged (it already has the edit), absent (the
    milestone has no such file) or conflict. `before` and `after` are texts; None: no such file.
    """

    file: str
    milestone: str
    kind: str
    before: str | None
    after: str | None
    symbols: tuple[str, ...] = ()  # those with a conflict
    reason: str = ""

    @property
    def place(self) -> str:
        """The symbols with a conflict, for a sentence."""
        return ", ".join(self.symbols) or "the whole file"

    @property
    def words(self) -> str:
        """The kind in words, for a table."""
        return {
            "same": "the same as in the milestone below: copied",
            "merged": "merged with the changes of the lesson",
            "created": "a new file: copied",
            "deleted": "the same as in the milestone below: deleted",
            "unchanged": "already has the edit",
            "absent": "a lesson removed this file: nothing to do from here on",
            "conflict": f"CONFLICT in {self.place}: {self.reason}",
        }[self.kind]

    def described(self) -> dict[str, object]:
        """The data for `--json`."""
        keys = ("file", "milestone", "kind", "symbols", "reason")
        return {key: getattr(self, key) for key in keys}


def step(file: str, milestone: str, old: str | None, new: str | None, upper: str | None) -> Step:
    """Apply the change from `old` to `new`, texts of the milestone below, to the text `upper`."""

    def made(kind: str, after: str | None = upper, **more: object) -> Step:
        return Step(file, milestone, kind, upper, after, **more)  # type: ignore[arg-type]

    if upper == new:
        return made("unchanged")
    if upper == old:
        return made("created" if old is None else "deleted" if new is None else "same", new)
    if upper is None:
        return made("absent")
    if old is None:
        return made("conflict", reason="the file is new below, but exists in this milestone")
    if new is None:
        return made("conflict", reason="the file is deleted below, but this lesson changed it")
    merged, clean = three_way(upper, old, new, milestone)
    if clean:
        return made("merged" if merged != upper else "unchanged", merged)
    symbols = conflicting_symbols(merged)
    return made("conflict", merged, symbols=symbols, reason="the lesson changed the same lines")


def three_way(ours: str, old: str, new: str, milestone: str) -> tuple[str, bool]:
    """Run `git merge-file`. Return the merged text, and whether there was no conflict."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("ours", "old", "new")]
        for path, text in zip(paths, (ours, old, new), strict=True):
            path.write_bytes(text.encode())
        labels = [part for label in (milestone, "before", "edit") for part in ("-L", label)]
        command = ["git", "merge-file", "--stdout", "--diff3", *labels, *map(str, paths)]
        done = subprocess.run(command, capture_output=True)
    if done.returncode < 0 or done.returncode > 127:
        raise ValueError(f"git merge-file failed: {done.stderr.decode().strip()}")
    return done.stdout.decode(), done.returncode == 0


def conflicting_symbols(merged: str) -> tuple[str, ...]:
    """Return the symbols, in this milestone's version, that have lines between conflict markers."""
    kept: list[str] = []  # the text with all conflicts resolved to this milestone's side
    places: list[int] = []
    side = "both"
    for line in merged.splitlines(keepends=True):
        if line.startswith(BEGIN):
            side = "ours"
            places.append(len(kept) + 1)
        elif side == "ours" and line.startswith("||||||| "):
            side = "theirs"
        elif side != "both" and line.startswith(END):
            side = "both"
        elif side != "theirs":
            kept.append(line)
            if side == "ours":
                places.append(len(kept))
    text = "".join(kept)
    named = dict.fromkeys(symbol_at(text, place) for place in places)
    inner = [name for name in named if name != MODULE]
    return tuple(inner or named)


def edited(root: Path, milestone: str, since: str) -> list[str]:
    """Return the files of a milestone that differ from a commit, including new files."""
    folder = place(milestone)
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", since, "--", folder)
    fresh = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", folder)
    names = {name for name in (changed + fresh).split("\0") if name}
    return sorted(Path(name).relative_to(folder).as_posix() for name in names)


def text_at(root: Path, commit: str, path: str) -> str | None:
    """Return a file as it is in a commit, or None if the commit has no such file."""
    if not _git(root, "ls-tree", "--full-tree", "-z", commit, "--", path):
        return None
    return _git(root, "cat-file", "-p", f"{commit}:{path}")


def text_of(path: Path) -> str | None:
    """Return a file of the working tree, or None. Raises `ValueError` for a binary file."""
    try:
        return path.read_bytes().decode() if path.exists() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def write(root: Path, steps: list[Step]) -> None:
    """Write all texts to temporary files first, and then move each of them to its place."""
    staged: list[tuple[str, Path]] = []
    try:
        for one in steps:
            if one.after is not None:
                path = root / place(one.milestone) / one.file
                staged.append((_staged(path, one.after), path))
    except OSError:
        for name, _ in staged:
            os.unlink(name)
        raise
    for name, path in staged:
        os.replace(name, path)
    for one in steps:
        if one.after is None:
            (root / place(one.milestone) / one.file).unlink()


def _staged(path: Path, text: str) -> str:
    """Write a text to a temporary file beside `path`, with the same rights. Return its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(text.encode())
    os.chmod(name, path.stat().st_mode & 0o7777 if path.exists() else 0o644)
    return name


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        said = done.stderr.decode().strip().split("\n")[0]
        raise ValueError(f"git {arguments[0]}: {said}")
    try:
        return done.stdout.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"git {' '.join(arguments)}: not text: {error}") from error
