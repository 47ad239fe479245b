"""Waits for files to be saved, by looking at their times: no library, any file system."""

from __future__ import annotations

import ast
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

INTERVAL = 0.3  # seconds between two looks
Sleep = Callable[[float], None]


def changes(folders: Iterable[Path], sleep: Sleep = time.sleep) -> Iterator[None]:
    """Once at the start, then each time that a Python file below the folders is another one."""
    folders = list(folders)
    seen = stamps(folders)
    yield
    while True:
        sleep(INTERVAL)
        now = stamps(folders)
        if now != seen:
            sleep(INTERVAL / 2)  # an editor may write in two goes
            seen = stamps(folders)
            yield


def stamps(folders: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Time and size of each file; one that goes while we look is not there."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            try:
                stat = path.stat()
            except OSError:
                continue
            found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def syntax_error(root: Path, milestone: str) -> dict[str, str] | None:
    """The first file of a rung that is no Python, with the line, a caret and what is wrong."""
    for path in sorted((root / milestone).rglob("*.py")):
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path))
        except SyntaxError as error:
            line = (error.text or "").rstrip("\n").expandtabs()
            caret = " " * max(0, (error.offset or 1) - 1) + "^"
            return {
                "where": f"{path.relative_to(root)}:{error.lineno}",
                "message": error.msg,
                "source": textwrap.dedent(f"{line}\n{caret}") if line else "",
            }
        except (OSError, ValueError) as error:  # gone while it is saved; not UTF-8; null bytes
            return {"where": str(path.relative_to(root)), "message": str(error), "source": ""}
    return None
