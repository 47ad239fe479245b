"""Ctrl-C ends a command with one line, also while it imports modules and loads a model."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType


def show_as_one_line() -> None:
    """In a command of this project, print no traceback for Ctrl-C. In a library, change nothing."""
    # With `python -m`, this is the first argument while the packages above the module are imported.
    if sys.argv[0] == "-m" or sys.argv[0].endswith("/milestones/__main__.py"):
        sys.excepthook = _show
        signal.signal(signal.SIGINT, _interrupt)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C has caused an exception.

    A library that is interrupted while it imports a module may say that the module is missing.
    """
    seen: set[int] = set()  # a chain may be a circle
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if id(error) in seen:
            return False
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return error is not None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; in an import, end the process, where nothing needs to be undone.

    Libraries catch the exception in an import, and go on without a part of them. If C++ has called
    Python, as torch does, the exception would abort the process.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            sys.stderr.write("\ninterrupted\n")
            sys.stderr.flush()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if is_interrupt(error):
        sys.stderr.write("\ninterrupted\n")
    else:
        sys.__excepthook__(kind, error, traceback)
