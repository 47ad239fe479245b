"""Write recorded data: as JSON with one step or one row a line, and as a block of a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LINE, ROW = 120, 2000  # characters of a value on one line, and of an item of a list


def write(path: Path, document: Any) -> None:
    """Write a JSON file, completely or not at all.

    A value that is too long for a line has a line for each item or entry.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(_text(document, "\n") + "\n", encoding="utf-8")
    unfinished.replace(path)


def write_block(path: Path, name: str, lines: Iterable[str]) -> None:
    """Replace the block of a page between `<!-- name -->` and `<!-- /name -->`."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = path.read_text(encoding="utf-8").split(start)
    text = "\n".join([f"{before}{start}", *lines, f"{end}{rest.split(end)[1]}"])
    path.write_text(text, encoding="utf-8")


def _text(value: Any, margin: str, most: int = LINE) -> str:
    whole = json.dumps(value, ensure_ascii=False)
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
    if len(whole) <= most or not any(isinstance(one, (dict, list)) for one in inner):
        return whole
    deeper = margin + " "
    if isinstance(value, dict):
        rows = [f"{json.dumps(str(key))}: {_text(one, deeper)}" for key, one in value.items()]
    else:
        rows = [_text(one, deeper, ROW) for one in value]
    first, last = whole[0], whole[-1]
    return f"{first}{deeper}{f',{deeper}'.join(rows)}{margin}{last}"
