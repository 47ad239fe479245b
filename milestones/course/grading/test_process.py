"""The process of one test. Graded code runs here, so its report is only a claim.

`exam.py` forks this process, and judges the claim.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..testing.probe import Probe
from .integrity import Integrity

OPTIONS = (
    "-p", "no:cacheprovider", "-p", "no:junitxml", "-q", "--tb=short", "-o", "addopts=",
    "-p", "no:faulthandler",
)  # fmt: skip
_write, _dumps, _exit = os.write, json.dumps, os._exit


class Witness:
    """Records whether the test's function ran to its end, and which plugins pytest has.

    With a canary, it lets the test fail after its last line. Such a run must not be reported as
    passed.
    """

    def __init__(self, canary: str | None) -> None:
        self.canary = canary
        self.finished = False
        self.listeners: list[object] = []
        self.problems: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        self.listeners = list(session.config.pluginmanager.get_plugins())

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if isinstance(item, pytest.Function):
                item.obj = self._watched(item.obj)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        known = {id(listener) for listener in self.listeners}
        for listener in session.config.pluginmanager.get_plugins():
            file = getattr(listener, "__file__", None) or ""
            if id(listener) not in known and not file.endswith("conftest.py"):
                self.problems.append(f"a plugin has been registered: {type(listener).__name__}")

    def _watched(self, test: Callable[..., Any]) -> Callable[..., Any]:
        def watched(**arguments: Any) -> None:
            __tracebackhide__ = True
            test(**arguments)
            if self.canary is not None:
                raise AssertionError(self.canary)
            self.finished = True

        return watched


def sit(
    test: str, tree: Path, claims: int, log: int, token: str, canary: str | None, seconds: float
) -> None:
    """Run one test, write the claim to `claims`, and end the process. Does not return."""
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable(log)
    faulthandler.dump_traceback_later(max(seconds - 0.5, seconds / 2), file=log)
    events: list[dict[str, Any]] = []
    witness = Witness(canary)
    plugins = [Probe(events.append, tree), witness]
    integrity = Integrity()
    arguments = [*OPTIONS, f"--rootdir={tree}", str(test)]
    try:
        ended = f"pytest ended with {pytest.main(arguments, plugins=plugins)!r}"
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    claim = {
        "token": token,
        "collected": [e["nodes"] for e in events if e["event"] == "collected"],
        "results": [e["result"] for e in events if e["event"] == "result"],
        "finished": witness.finished,
        "problems": [*witness.problems, *integrity.problems()],
        "ended": ended,
    }
    sys.stdout.flush()
    data = _dumps(claim).encode() + b"\n"
    while data:
        data = data[_write(claims, data) :]
    _exit(0)
