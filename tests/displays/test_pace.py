"""A demo on a terminal goes step by step, and leaves the terminal as it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from common.displays.pace import RIGHT, Keyboard, Pace

termios = pytest.importorskip("termios", reason="terminals of Unix")


def pace_with(*keys: str) -> tuple[Pace, list[str]]:
    """Return a pace with a person who presses these keys, and the keys that are left."""
    left = list(keys)
    return Pace(lambda seconds: left.pop(0) if left else ""), left


def test_a_step_is_shown_for_a_while() -> None:
    def no_key(seconds: float | None) -> str:
        time.sleep(seconds or 0)
        return ""

    with Pace(no_key) as pace:
        started = time.perf_counter()
        for _ in range(3):
            pace.wait(0.02)
    assert time.perf_counter() - started >= 0.06


def test_a_slow_step_is_not_made_longer_and_its_keys_are_read() -> None:
    waits, keys = list[float | None](), ["", "q"]

    def read_key(seconds: float | None) -> str:
        waits.append(seconds)
        return keys.pop(0)

    with Pace(read_key) as pace:
        for _ in range(3):
            time.sleep(0.02)
            pace.wait(0.01)
    assert waits == [0, 0] and pace.is_skipping


def test_an_arrow_runs_one_step_and_a_space_goes_on() -> None:
    pace, left = pace_with("x", RIGHT, RIGHT, "x", " ")
    with pace:
        for remaining in (3, 2):
            pace.wait()
            assert len(left) == remaining and pace.is_paused
        pace.wait(0.0)
    assert not left and not pace.is_paused


def test_q_skips_the_rest() -> None:
    pace, left = pace_with(" ", "q")
    for _ in range(100):
        pace.wait(60)
    assert not left


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Return both ends of a terminal: that of the person, and that of the program."""
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


def test_the_terminal_is_restored(terminal: tuple[int, int]) -> None:
    person, program = terminal
    before = termios.tcgetattr(program)
    with Keyboard(program) as keys:
        for sent, key in ((b"q", "q"), (b"\x1b[C", RIGHT), (b"\x1bOC", RIGHT), (b"  ", " ")):
            os.write(person, sent)  # no line end: keys come at once
            assert keys.read(60) == key
        assert keys.read(0) == ""
    assert termios.tcgetattr(program) == before
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), Keyboard(program):
        signal.raise_signal(signal.SIGTERM)
    assert termios.tcgetattr(program) == before
    assert signal.getsignal(signal.SIGTERM) == handler
