"""Wait for files to be saved. Compares their times, which works on any file system."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...chain import place
from ..testing.results import Failure, with_caret

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


def syntax_error(root: Path, milestone: str) -> Failure | None:
    """Return the first syntax error in a milestone, or why a file of it cannot be read."""
    for path in sorted((root / place(milestone)).rglob("*.py")):
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path))
        except SyntaxError as error:
            where = f"{path.relative_to(root)}:{error.lineno}"
            return Failure("SyntaxError", error.msg, where=where, source=with_caret(error))
        except (OSError, ValueError) as error:  # deleted while it is saved; not UTF-8; null bytes
            return Failure(type(error).__name__, str(error), where=str(path.relative_to(root)))
    return None
