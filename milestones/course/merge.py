"""Three-way merges of one file of a rung: with Git's eyes, without touching Git's index."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .outline import MODULE, symbol_at

BEGIN, MIDDLE, END = "<<<<<<< ", "=======\n", ">>>>>>> "  # Git's marks


@dataclass(frozen=True)
class Step:
    """What becomes of one file on one rung.

    `kind`: same (copied), merged, created, deleted; unchanged (it has the edit already), absent
    (the rung has no such file) or conflict. `before` and `after` are texts; None: no such file.
    """

    file: str
    rung: str
    kind: str
    before: str | None
    after: str | None
    symbols: tuple[str, ...] = ()  # in which a conflict lies
    reason: str = ""

    @property
    def place(self) -> str:
        """The symbols of a conflict, for a sentence."""
        return ", ".join(self.symbols) or "the whole file"

    @property
    def words(self) -> str:
        """For a table."""
        return {
            "same": "the same as below: copied",
            "merged": "merged with what the lesson changed",
            "created": "new: copied",
            "deleted": "the same as below: deleted",
            "unchanged": "has the edit already",
            "absent": "a lesson removed the file: nothing to do from here on",
            "conflict": f"CONFLICT in {self.place}: {self.reason}",
        }[self.kind]

    def described(self) -> dict[str, object]:
        """For `--json`."""
        keys = ("file", "rung", "kind", "symbols", "reason")
        return {key: getattr(self, key) for key in keys}


def step(file: str, rung: str, old: str | None, new: str | None, upper: str | None) -> Step:
    """Carry the change from `old` to `new`, texts of the rung below, into the rung's own text."""

    def made(kind: str, after: str | None = upper, **more: object) -> Step:
        return Step(file, rung, kind, upper, after, **more)  # type: ignore[arg-type]

    if upper == new:
        return made("unchanged")
    if upper == old:
        return made("created" if old is None else "deleted" if new is None else "same", new)
    if upper is None:
        return made("absent")
    if old is None:
        return made("conflict", reason="the file is new below, and this rung has one of its own")
    if new is None:
        return made("conflict", reason="the file is deleted below, and this rung's lesson needs it")
    merged, clean = three_way(upper, old, new, rung)
    if clean:
        return made("merged" if merged != upper else "unchanged", merged)
    symbols = conflicting_symbols(merged)
    return made("conflict", merged, symbols=symbols, reason="the lesson touched the same lines")


def three_way(ours: str, old: str, new: str, rung: str) -> tuple[str, bool]:
    """`git merge-file`: the merged text, and whether it has no conflict."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("ours", "old", "new")]
        for path, text in zip(paths, (ours, old, new), strict=True):
            path.write_bytes(text.encode())
        labels = [part for label in (rung, "before", "edit") for part in ("-L", label)]
        command = ["git", "merge-file", "--stdout", "--diff3", *labels, *map(str, paths)]
        done = subprocess.run(command, capture_output=True)
    if done.returncode < 0 or done.returncode > 127:
        raise ValueError(f"git merge-file failed: {done.stderr.decode().strip()}")
    return done.stdout.decode(), done.returncode == 0


def conflicting_symbols(merged: str) -> tuple[str, ...]:
    """The symbols, in this rung's version, of the lines between marks."""
    kept: list[str] = []  # the text with all conflicts resolved to this rung's side
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


def edited(root: Path, rung: str, since: str) -> list[str]:
    """Files of a rung that differ from a commit, new ones included, relative to the rung."""
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", since, "--", rung)
    fresh = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", rung)
    names = {name for name in (changed + fresh).split("\0") if name}
    return sorted(Path(name).relative_to(rung).as_posix() for name in names)


def text_at(root: Path, commit: str, path: str) -> str | None:
    """A file as a commit has it; None where it has no such file."""
    if not _git(root, "ls-tree", "--full-tree", "-z", commit, "--", path):
        return None
    return _git(root, "cat-file", "-p", f"{commit}:{path}")


def text_of(path: Path) -> str | None:
    """A file of the working tree; None where it is not there. Raises `ValueError` if binary."""
    try:
        return path.read_bytes().decode() if path.exists() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def write(root: Path, steps: list[Step]) -> None:
    """Write all texts beside their files first, then put each in its file's place."""
    staged: list[tuple[str, Path]] = []
    try:
        for one in steps:
            if one.after is not None:
                path = root / one.rung / one.file
                staged.append((_staged(path, one.after), path))
    except OSError:
        for name, _ in staged:
            os.unlink(name)
        raise
    for name, path in staged:
        os.replace(name, path)
    for one in steps:
        if one.after is None:
            (root / one.rung / one.file).unlink()


def _staged(path: Path, text: str) -> str:
    """The name of a file beside `path` with this text and the same rights."""
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
