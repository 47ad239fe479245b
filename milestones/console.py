"""The console for reports."""

from __future__ import annotations

from rich.console import Console

PIPED = 240  # characters: wide enough for every table when no terminal sets the width


def wide_console() -> Console:
    """Return a console as wide as the terminal, or else wide enough for all. No markup."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPED
    return console
