"""What a figure is: a question, the controls that a reader moves, and a function that draws.

    figure = Figure(name="triangle", question=..., controls=(...), draw=draw, asked={...})
    shown = figure.shown({"cache": 0})      # the values of the other controls are the first ones

Plain Python: a browser runs it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Value: TypeAlias = "int | str"


@dataclass(frozen=True)
class Control:
    """A number between `low` and `high`, a switch (0 and 1), one of the choices, or a text.

    first: its value when the page opens. The value of a choice is its number.
    """

    name: str
    label: str
    first: Value
    low: int = 0
    high: int = 1
    choices: tuple[str, ...] = ()
    lines: int = 8  # the most lines of a text, and the most characters of a line
    columns: int = 60

    @property
    def kind(self) -> Literal["range", "checkbox", "select", "text"]:
        if isinstance(self.first, str):
            return "text"
        if self.choices:
            return "select"
        return "checkbox" if (self.low, self.high) == (0, 1) else "range"

    def checked(self, value: Value) -> Value:
        """Return the value. Raises `ValueError` that names the limits."""
        if self.kind == "text":
            lines = str(value).splitlines()
            if len(lines) > self.lines or max(map(len, lines), default=0) > self.columns:
                raise ValueError(
                    f"{self.label}: at most {self.lines} lines of {self.columns} characters"
                )
            return str(value)
        high = len(self.choices) - 1 if self.choices else self.high
        if not isinstance(value, int) or not self.low <= value <= high:
            raise ValueError(f"{self.name} is {value!r}, but must be {self.low} to {high}")
        return value


@dataclass(frozen=True)
class Shown:
    """What a figure shows: an SVG, a sentence, and the number that its question asks for."""

    svg: str
    words: str
    answer: int


@dataclass(frozen=True)
class Figure:
    """A figure.

    asked: the values of controls for which the question asks; the others have their first value.
    draw: takes the value of each control by name.
    """

    name: str
    title: str
    question: str
    controls: tuple[Control, ...]
    draw: Callable[..., Shown]
    asked: Mapping[str, Value] = field(default_factory=dict)

    @property
    def first(self) -> dict[str, Value]:
        """Return the values of all controls when the page opens."""
        return {control.name: control.first for control in self.controls}

    def shown(self, values: Mapping[str, Value]) -> Shown:
        """Draw. Raises `ValueError` if a value is outside its limits or has no control."""
        if unknown := values.keys() - self.first.keys():
            raise ValueError(f"{self.name} has no control {sorted(unknown)[0]!r}")
        chosen = self.first | dict(values)
        return self.draw(**{c.name: c.checked(chosen[c.name]) for c in self.controls})

    def described(self) -> dict[str, Any]:
        """Return what the script of the page must know: no more than JSON."""
        return {"name": self.name, "first": self.first, "asked": self.first | dict(self.asked)}
