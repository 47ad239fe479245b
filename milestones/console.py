"""The consoles for reports. If the reader of a pipe has seen enough, they let the command end."""

from __future__ import annotations

from rich.console import Console

PIPED = 240  # characters: wide enough for every table when no terminal sets the width


class ReportConsole(Console):
    """rich's console, without its own exit status for a closed pipe: `main` has one for all."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


def wide_console() -> Console:
    """Return a console as wide as the terminal, or else wide enough for all. No markup."""
    console = ReportConsole(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPED
    return console
