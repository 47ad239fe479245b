"""Tests that this run leaves out: those of missing extras, and, without `--thorough`, of the second
tier.

The summary says how many tests were left out, and what runs them. An extra may also be programs of
the system, which pip does not install.
"""

from __future__ import annotations

import functools
import re
import shutil
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from milestones.extras import missing as missing_of_pip

COUNTED = "deselected tests by reason"
THOROUGH = "thorough: `make test-all` or --thorough runs them"
FIRST = "first tier: a run without --rest runs them"
# With `--thorough`, or with what is installed meanwhile, tests of modules with these words do more.
MORE = ("schedules(", "browser", "importorskip", "THOROUGH")
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


class Deselected:
    """A plugin of pytest. With xdist, the workers tell the controller what they deselected."""

    def __init__(self, thorough: bool, rest: bool = False, shard: Shard | None = None) -> None:
        """thorough: run the tests of the second tier, too. rest: leave out those of the first.
        shard: run these only."""
        self.thorough = thorough
        self.rest = rest
        self.shard = shard
        self.counts: dict[str, int] = {}  # tests by reason
        self.missing = functools.cache(missing)

    @pytest.hookimpl(trylast=True)  # counted are tests of the chosen engines only
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        reasons = {item: self._reasons(item) for item in items}
        for reason in (reason for of_item in reasons.values() for reason in of_item):
            self.counts[reason] = self.counts.get(reason, 0) + 1
        config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
        items[:] = [item for item in items if not reasons[item]]
        if hasattr(config, "workeroutput"):
            config.workeroutput[COUNTED] = self.counts

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.counts |= getattr(node, "workeroutput", {}).get(COUNTED, {})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for reason, count in self.counts.items():
            terminalreporter.write_line(f"{count} tests deselected: {reason}")

    def _reasons(self, item: pytest.Item) -> set[str]:
        """Return why a test is left out, or an empty set."""
        needed = {mark.args[0] for mark in item.iter_markers("extra")}
        absent = {text for name in needed if (text := self.missing(name)) is not None}
        if self.rest and not (needed or is_thorough(item) or does_more(item.path)):
            return {FIRST}
        if self.shard and not self.shard.has(item.nodeid):
            return {f"not in shard {self.shard}"}
        return absent if self.thorough or not is_thorough(item) else absent | {THOROUGH}


@dataclass(frozen=True)
class Shard:
    """One of several equal parts of a run, such as 2/3. A test is always in the same part."""

    number: int  # counted from 1
    parts: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise pytest.UsageError(f"a shard is one like 2/3, not {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def has(self, test: str) -> bool:
        """Return whether the test of this name is in the shard."""
        return zlib.crc32(test.encode()) % self.parts == self.number - 1


@functools.cache
def does_more(module: Path) -> bool:
    """Return whether tests of a module do more in the second tier, or with more programs."""
    text = module.read_text(encoding="utf-8")
    return any(word in text for word in MORE)


def is_thorough(item: pytest.Item) -> bool:
    """Return whether a test is in the second tier: one of its marks says so for its engine."""
    callspec = getattr(item, "callspec", None)
    milestone = callspec.params.get("milestone") if callspec else None
    marks = item.iter_markers("thorough")
    return any(milestone not in mark.kwargs.get("fast_on", ()) for mark in marks)


def thorough_except(fast: Collection[Any], cases: Iterable[Any], reason: str) -> list[Any]:
    """Return the cases of a parametrized test. Only those named in `fast` are in the first tier.

    A case is named by its `id`, or it is a name itself.
    """
    mark = pytest.mark.thorough(reason)
    names = [(case, getattr(case, "id", case)) for case in cases]
    return [case if name in fast else pytest.param(case, marks=mark) for case, name in names]
