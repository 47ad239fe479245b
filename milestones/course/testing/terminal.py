"""Tests under `check` have no terminal, so a debugger cannot ask anything there."""

from __future__ import annotations

NO_TERMINAL = "breakpoint() has no terminal here; `check --debug` runs the test with one"


def no_terminal(*_: object, **__: object) -> None:
    """Refuse a `breakpoint()`, because it would wait for an answer that cannot come."""
    raise RuntimeError(NO_TERMINAL)
