"""Wait for files to be saved. Compares their times, which works on any file system."""

from __future__ import annotations

import ast
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...chain import place

INTERVAL = 0.3  # seconds between two comparisons
Sleep = Callable[[float], None]


def changes(folders: Iterable[Path], sleep: Sleep = time.sleep) -> Iterator[None]:
    """Yield once at the start, and then each time that a Python file in the folders has changed."""
    folders = list(folders)
    seen = stamps(folders)
    yield
    while True:
        sleep(INTERVAL)
        now = stamps(folders)
        if now != seen:
            sleep(INTERVAL / 2)  # an editor may write a file in two parts
            seen = stamps(folders)
            yield


def stamps(folders: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return time and size of each file. A file that is being deleted is left out."""
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
    """Return the first syntax error in a milestone: place, message, and line with a caret."""
    for path in sorted((root / place(milestone)).rglob("*.py")):
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
        except (OSError, ValueError) as error:  # deleted while it is saved; not UTF-8; null bytes
            return {"where": str(path.relative_to(root)), "message": str(error), "source": ""}
    return None
