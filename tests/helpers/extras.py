"""Tests with the mark `extra("serve")` need the packages of that extra.

Without the packages, the tests are deselected, and the summary says how many. An extra may also be
programs of the system, which pip does not install.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from milestones.extras import missing as missing_of_pip

COUNTED = "tests without their extra"
PROGRAMS = {  # of each extra, with Debian's package that has the program
    "arm": {"aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"},
}


def missing(extra: str) -> str | None:
    """Return a line that says how to install what an extra lacks; None if it is complete."""
    if extra not in PROGRAMS:
        return missing_of_pip(extra)
    absent = [name for name in PROGRAMS[extra] if not shutil.which(name)]
    packages = " ".join(PROGRAMS[extra][name] for name in absent)
    return f"no {', '.join(absent)}: apt-get install {packages}" if absent else None


class Extras:
    """A plugin of pytest. With xdist, the workers tell the controller what they deselected."""

    def __init__(self) -> None:
        self.deselected: dict[str, int] = {}  # tests by extra

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        named = {mark.args[0] for item in items for mark in item.iter_markers("extra")}
        absent = {name for name in named if missing(name)}
        dropped = [item for item in items if needed(item) & absent]
        for item in dropped:
            for name in needed(item) & absent:
                self.deselected[name] = self.deselected.get(name, 0) + 1
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if not needed(item) & absent]
        if hasattr(config, "workeroutput"):
            config.workeroutput[COUNTED] = self.deselected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.deselected |= getattr(node, "workeroutput", {}).get(COUNTED, {})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name, count in self.deselected.items():
            terminalreporter.write_line(f"{count} tests deselected: {missing(name)}")


def needed(item: pytest.Item) -> set[str]:
    """Return the extras that a test needs."""
    return {mark.args[0] for mark in item.iter_markers("extra")}
