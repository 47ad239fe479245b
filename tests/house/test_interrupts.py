"""Ctrl-C while a command imports modules and loads a model: one line, and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from common.interrupts import is_interrupt
from tests.conftest import ROOT

COMMANDS = {
    "demo": ["-m", "m5_overlap.demo", "--model", "tiny-llama", "--requests", "2"],
    "serve": ["-m", "milestones", "serve", "m4", "--model", "tiny-llama", "--port", "0"],
}


def test_an_interrupt_is_found_behind_another_error() -> None:
    """A library may say that a module is missing, if its import was interrupted."""
    error: BaseException = KeyboardInterrupt()
    for kind in (ImportError, ValueError):
        try:
            raise kind("Could not import module") from error
        except Exception as later:
            error = later
    assert is_interrupt(error)
    assert not is_interrupt(ValueError()) and not is_interrupt(None)


@pytest.mark.thorough("processes that load a model")
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_traceback(command: str, seconds: float) -> None:
    """It is sent when torch is being imported, or some time after."""
    process = subprocess.Popen(
        [sys.executable, *COMMANDS[command]], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        assert process.poll() is None, "the command has ended before it was interrupted"
        time.sleep(0.01)
    time.sleep(seconds)
    for _ in range(6):  # a library may swallow one outside of an import; a person presses again
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=10)
            break
    else:
        process.kill()
        pytest.fail("the command does not end")
    assert "Traceback" not in err and "Error" not in err, err
    assert process.returncode in (0, 1, -signal.SIGINT), (out, err)
