"""`IdentityCache`: a function that caches the result for its latest argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


class IdentityCache(Generic[Given, Made]):
    """A function that remembers its latest argument and the result for it.

    Arguments are compared by identity (`is`), not by value. It is used for arguments that all
    layers of a forward receive. Threads may share it: each thread reads and writes a whole pair of
    argument and result. A thread that finds the pair of another thread computes its own result
    again.
    """

    def __init__(self, make: Callable[[Given], Made]) -> None:
        self.make = make
        self._latest: tuple[Given, Made] | None = None

    def __call__(self, given: Given) -> Made:
        latest = self._latest
        if latest is None or latest[0] is not given:
            latest = self._latest = given, self.make(given)
        return latest[1]
