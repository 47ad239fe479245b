"""`Pace`: how fast a demo goes on. A person reads each step; keys pause it and skip the rest."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from typing_extensions import Self

STEPS_PER_SECOND = 4
HELP = "space: pause · →: one step · q: to the end"
RIGHT = "→"
RIGHT_CODES = ("\x1b[C", "\x1bOC")  # what a terminal sends, in both of its modes


class Pace:
    """Waits after each step, until the next one is due or is asked for.

    It reads keys between `__enter__` and `__exit__`. Then the terminal is as it was before, also
    after Ctrl-C and SIGTERM.
    """

    def __init__(self, read_key: Callable[[float | None], str] | None = None) -> None:
        """read_key: waits for a key for so many seconds, None for ever; returns "" for none."""
        self.read_key = read_key
        self.is_paused = False
        self.is_skipping = False
        self.due = 0.0  # when the next step may begin, in seconds of `time.perf_counter`
        self.waited = 0.0  # seconds, in all steps
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if self.read_key is None and (keys := Keyboard.of_terminal()) is not None:
            self._undo.enter_context(keys)
            self.read_key = keys.read
        self.due = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def wait(self, seconds: float = 1 / STEPS_PER_SECOND) -> None:
        """Let a person look at the screen. seconds: how long, unless a key says something else."""
        started = time.perf_counter()
        self.due = max(self.due + seconds, started)
        while not self.is_skipping:
            left = None if self.is_paused else max(0.0, self.due - time.perf_counter())
            key = self._key(left)  # also after a slow step: its keys must not be lost
            if not key:
                break
            if key == RIGHT:
                self.is_paused = True
                break
            self._press(key)
        self.waited += time.perf_counter() - started

    def _key(self, seconds: float | None) -> str:
        if self.read_key is not None:
            return self.read_key(seconds)
        assert seconds is not None, "without a keyboard nothing can pause"
        time.sleep(seconds)
        return ""

    def _press(self, key: str) -> None:
        if key == " ":
            self.is_paused = not self.is_paused
            self.due = time.perf_counter()
        elif key == "q":
            self.is_skipping = True


class Keyboard:
    """Single keys of the terminal that this process runs in."""

    def __init__(self, terminal: int) -> None:
        """terminal: a file descriptor."""
        self.terminal = terminal

    @classmethod
    def of_terminal(cls) -> Keyboard | None:
        """Return the keyboard; None if there is none, or if another program has the terminal."""
        try:
            import termios  # not on Windows

            terminal = sys.stdin.fileno()
            termios.tcgetattr(terminal)
            in_front = os.tcgetpgrp(terminal) == os.getpgrp()
        except Exception:
            return None
        is_main = threading.current_thread() is threading.main_thread()  # it handles signals
        return cls(terminal) if in_front and is_main else None

    def __enter__(self) -> Self:
        import termios
        import tty

        self._before = termios.tcgetattr(self.terminal)
        self._on_term: Any = signal.signal(signal.SIGTERM, _exit)
        tty.setcbreak(self.terminal)  # keys come at once, and are not shown; Ctrl-C still works
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        termios.tcsetattr(self.terminal, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGTERM, self._on_term)

    def read(self, seconds: float | None) -> str:
        """Wait for a key for so many seconds, None for ever. Return "" if there is none."""
        ready, _, _ = select.select([self.terminal], [], [], seconds)
        keys = os.read(self.terminal, 16).decode(errors="replace") if ready else ""
        return RIGHT if keys.startswith(RIGHT_CODES) else keys[:1]


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
