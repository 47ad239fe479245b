"""`Latest`: what follows from an argument that comes again and again, made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


class Latest(Generic[Given, Made]):
    """A function that remembers its latest argument, itself and not its like, and what it returned.

    For what all layers of a forward are given. Threads may share it: each reads and writes whole
    pairs, and who finds another's makes its own again.
    """

    def __init__(self, make: Callable[[Given], Made]) -> None:
        self.make = make
        self._latest: tuple[Given, Made] | None = None

    def __call__(self, given: Given) -> Made:
        latest = self._latest
        if latest is None or latest[0] is not given:
            latest = self._latest = given, self.make(given)
        return latest[1]
