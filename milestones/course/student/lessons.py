"""Texts that the course uses in several places: the milestones' lessons, the invariants."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ...chain import place

INVARIANTS = {
    1: ("One answer", "Greedy output equals that of Hugging Face's `generate`, token for token."),
    2: ("Batch invariance", "A request's tokens depend only on the request itself."),
    3: ("Nothing leaks", "A request that is done, aborted or failed holds no memory."),
    4: ("Bad input is refused, alone", "The error names field and limit. Other requests go on."),
    5: ("Progress", "Any admitted request finishes."),
    6: ("Text is whole", "No half characters, no start of a stop string. The pieces join."),
}


def lesson(milestone: str, root: Path) -> str:
    """Return a milestone's lesson: the first sentence of its package's docstring."""
    source = (root / place(milestone) / "__init__.py").read_text(encoding="utf-8")
    doc = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")
    sentence = re.sub(r"^(Milestone \d+|Elective): ", "", doc)
    return sentence[:1].upper() + sentence[1:]


def invariants_in(text: str) -> list[int]:
    """Return the numbers of the invariants that a message names."""
    return sorted({int(number) for number in re.findall(r"\bI([1-6])\b", text)})
