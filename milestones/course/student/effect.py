"""`Effect`: what the mistake of a *Break it* does, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..testing.results import Run


@dataclass(frozen=True)
class Effect:
    """What a mistake does: to the tests of its exercise, and to the answers of an engine."""

    run: Run
    right: dict[str, Any]  # the results of `texts.py`, without the mistake
    wrong: dict[str, Any]  # and with it; both empty if the engine is not complete

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the tests that fail, without parameters, in order."""
        nodes = (r.node.rpartition("::")[2].partition("[")[0] for r in self.run.failures)
        return tuple(dict.fromkeys(nodes))

    @property
    def answers(self) -> str:
        """Whether the answers are "right", "wrong", or the engine "stops"."""
        if any(result["error"] for result in self.wrong.values()):
            return "stops"
        same = all(self.wrong[s]["answers"] == r["answers"] for s, r in self.right.items())
        return "right" if same else "wrong"
