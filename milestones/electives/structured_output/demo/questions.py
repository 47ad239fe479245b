"""The questions of the demo, and the grammars of their answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle

from common import StructuredOutputsParams
from common.displays.demo import chats

FRUIT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "color": {"enum": ["red", "green", "yellow", "blue"]},
        "sweet": {"type": "boolean"},
    },
    "required": ["name", "color", "sweet"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"


@dataclass(frozen=True)
class Question:
    """A question, and what its answer must look like; None for any text."""

    text: str
    grammar: StructuredOutputsParams | None

    @property
    def label(self) -> str:
        kinds = ("json", "regex", "choice")
        given = [k for k in kinds if self.grammar and getattr(self.grammar, k)]
        return f"[{given[0] if given else 'text'}] {self.text}"

    def is_satisfied(self, answer: str) -> bool:
        """Return whether an answer has the form that was asked for."""
        if self.grammar is None:
            return True
        if self.grammar.choice is not None:
            return answer in self.grammar.choice
        if self.grammar.regex is not None:
            return re.fullmatch(self.grammar.regex, answer) is not None
        return _is_valid(answer, FRUIT)


def questions(count: int) -> list[Question]:
    """Return `count` questions: plain ones, and three kinds of grammars in turn."""
    asked = (
        ("Name a fruit and describe it.", StructuredOutputsParams(json=FRUIT)),
        ("Is the sea salty?", StructuredOutputsParams(choice=["yes", "no", "perhaps"])),
        ("When was the last leap year?", StructuredOutputsParams(regex=DATE)),
    )
    plain, turn = iter(chats(count)), cycle(asked)
    return [
        Question(next(plain), None) if number % 2 else Question(*next(turn))
        for number in range(count)
    ]


def _is_valid(answer: str, schema: dict[str, object]) -> bool:
    try:
        document = json.loads(answer)
    except ValueError:
        return False
    if find_spec("jsonschema") is None:
        return True
    from jsonschema import Draft202012Validator

    return bool(Draft202012Validator(schema).is_valid(document))
