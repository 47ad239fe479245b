"""Run Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def run_python(*arguments: str, **variables: str | None) -> str:
    """Return what Python printed. A process that fails is a failed test, which shows its errors.

    arguments: of `python`, in the root of the repository. variables: of its environment, in place
    of those of this process; None removes one.
    """
    changed = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True,
        env={name: value for name, value in changed.items() if value is not None},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
