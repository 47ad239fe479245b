"""`python -m milestones grade`: right solutions that are written in an odd way lose no point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import Graded, once

HEAD = '"""A shelf with room for a few."""\n\nfrom __future__ import annotations\n'
assert SHELF.startswith(HEAD)


def changed(returned: str = "", *, first: str = "", imports: str = "") -> str:
    """Return the solution with another value for `put`, and with more code."""
    text = SHELF.replace("        return self._append(item)", f"        return {returned}")
    text = text if returned else SHELF
    text = text.replace("        if len(self.items)", f"{first}        if len(self.items)")
    return text.replace(HEAD, f"{HEAD}\n{imports}")


APPEND = "self._append(item)"
THREAD = """
from concurrent.futures import ThreadPoolExecutor
from threading import Thread, Event
POOL = ThreadPoolExecutor(4)
Thread(target=Event().wait).start()  # it never ends
"""
LOGS = """
import logging
logging.basicConfig(level=logging.DEBUG, filename="debug.log")
logging.getLogger().addHandler(logging.StreamHandler())
"""
OTHER_CLASS = """
from dataclasses import dataclass, field
from typing import Generic, TypeVar
T = TypeVar("T")


@dataclass(slots=True)
class Base(Generic[T]):
    items: list[T] = field(default_factory=list)
    names: dict[str, T] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return NotImplemented

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


class Shelf(Base[int]):
    def put(self, item: T) -> int:
        if len(self) >= 3:
            raise type("Full", (ValueError,), {})(f"no room for {item}")
        self.items += [item]
        return len(self)


def largest(shelf):
    return max(shelf.items)
"""
STRICT = """
import gc, random, sys, warnings
gc.disable()
random.seed(1)
sys.setrecursionlimit(100_000)
warnings.simplefilter("error")
"""
QUIET = """
import os, sys
sys.stdout = sys.stderr = open(os.devnull, "w")
"""
HONEST: dict[str, str | bytes] = {
    "numpy": changed(f"numpy.int64({APPEND})", imports="import numpy"),
    "float": changed(f"float({APPEND})"),
    "prints": changed(first="        print('x' * 3_000_000)\n"),
    "unicode": changed(first="        print('\u2192 \u4e66\u67b6', item)\n"),
    "thread": changed("POOL.submit(self._append, item).result()", imports=THREAD),
    "logs": changed(first="        logging.info('put %s', item)\n", imports=LOGS),
    "file": changed(first="        open('trace.json', 'a').write('put')\n"),
    "slow": changed(first="        time.sleep(0.1)\n", imports="import time\ntime.sleep(1)\n"),
    "other_class": OTHER_CLASS,
    "strict": changed(imports=STRICT),
    "quiet": changed(first="        print(item)\n", imports=QUIET),
    "windows": b"\xef\xbb\xbf" + SHELF.replace("\n", "\r\n").encode(),
    "tabs": SHELF.replace("    ", "\t"),
    "script": SHELF + "\nif __name__ == '__main__':\n    exit(input('which? '))\n",
}


def graded(folder: Path) -> Graded:
    """Grade all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", "de_DE.ISO-8859-1")  # the instructor's machine, not the student's
        return Graded(folder, HONEST)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    return once(tmp_path_factory, "honest", graded)


@pytest.mark.thorough("fifteen submissions, some with big imports")
@pytest.mark.parametrize("name", HONEST)
def test_an_odd_solution_has_all_points(name: str, honest: Graded) -> None:
    sheet = honest.sheets[name]
    (mark,) = sheet.marks
    failures = [result.failure for result in mark.results if result.failure]
    assert (sheet.points, sheet.suspect) == (10, False), (mark.answers.wrong, failures)
