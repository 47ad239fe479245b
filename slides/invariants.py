"""The slide of the invariants: what a milestone adds to them, and what breaks without it.

A line of the block is `I3 | Nothing leaks | a sentence | spans | what the spans show`. The spans
are those of a `gantt`: a small picture of what goes wrong without the invariant.
"""

from __future__ import annotations

from collections.abc import Callable

from .charts import gantt
from .sources import BuildError

WIDTH = 360  # pixels, of a picture


def invariants(body: str, inline: Callable[[str], str]) -> str:
    """Draw a row for each line of the body. `inline` makes HTML of Markdown."""
    rows = []
    for row in filter(None, map(str.strip, body.splitlines())):
        parts = [part.strip() for part in row.split(" | ")]
        if len(parts) != 5:
            raise BuildError(f"invariants: {row!r} needs five parts")
        number, name, sentence, spans, shown = parts
        rows.append(
            f'<div class="number">{number}</div>'
            f"<div><strong>{inline(name)}</strong><br>{inline(sentence)}</div>"
            f'<div class="without">{gantt(f": {spans}", "42", f"{WIDTH}")}'
            f"<small>{inline(shown)}</small></div>"
        )
    heads = '<div></div><div></div><div class="without"><small>without it</small></div>'
    return f'<div class="invariants">{heads}{"".join(rows)}</div>'
