"""The console that reports are printed to."""

from __future__ import annotations

from rich.console import Console

PIPED = 240  # characters: nothing of a table is cut where no terminal sets its width


def wide_console() -> Console:
    """As wide as the terminal; where it is piped, wide enough for all. Prints no markup."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPED
    return console
