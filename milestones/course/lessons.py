"""What the course says of itself in many places: the rungs' lessons, the invariants."""

from __future__ import annotations

import ast
import re
from pathlib import Path

INVARIANTS = {
    1: ("One answer", "Greedy output equals that of Hugging Face's `generate`, token for token."),
    2: ("Batch invariance", "A request's tokens depend on nothing but the request."),
    3: ("Nothing leaks", "Done, aborted or failed: no request and no memory is held."),
    4: ("Bad input is refused, alone", "By name and limit, before anybody else notices."),
    5: ("Progress", "Any admitted request finishes."),
    6: ("Text is whole", "No half characters, no start of a stop string, pieces that join."),
}


def lesson(milestone: str, root: Path) -> str:
    """A rung's lesson in a sentence: the first of its package's docstring."""
    source = (root / milestone / "__init__.py").read_text(encoding="utf-8")
    doc = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")
    sentence = re.sub(r"^Milestone \d+: ", "", doc)
    return sentence[:1].upper() + sentence[1:]


def invariants_in(text: str) -> list[int]:
    """The invariants that a message names."""
    return sorted({int(number) for number in re.findall(r"\bI([1-6])\b", text)})
