"""How the measurements are written: as JSON, and as a block of a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def write_block(path: Path, name: str, lines: Iterable[str]) -> None:
    """Replace the block of a page between `<!-- name -->` and `<!-- /name -->`."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = path.read_text(encoding="utf-8").split(start)
    text = "\n".join([f"{before}{start}", *lines, f"{end}{rest.split(end)[1]}"])
    path.write_text(text, encoding="utf-8")
