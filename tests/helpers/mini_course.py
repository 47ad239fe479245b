"""A miniature course with two exercises, which runs in no time. The console is tested on it.

`make(tmp_path)` writes its tree. The tree has the console too, so that a released tree can be used.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from milestones.chain import electives, place
from milestones.course.testing.runner import Runner
from tests.conftest import ROOT

Say = Callable[..., tuple[int, str]]

SHELF = '''"""A shelf with room for a few."""

from __future__ import annotations

import math
from collections import deque

ROOM = 3  # items
SECRET = 0.5  # only a solution needs it


class Shelf:
    """Keeps numbers in order."""

    def __init__(self) -> None:
        self.items: deque[int] = deque()

    # A student sees the comment above a definition.
    def put(self, item: int) -> int:
        """Add an item, and return how many there are now.

        Raises `ValueError` when there is no room.
        """
        if len(self.items) >= ROOM:  # the secret of put
            raise ValueError("no room")
        return self._append(item)

    def total(self) -> float:
        """The sum of all items."""
        return math.fsum(self.items) + SECRET - SECRET

    def _append(self, item: int) -> int:
        self.items.append(item)
        return len(self.items)


def largest(shelf: Shelf) -> int:
    """The largest item."""
    return max(shelf.items)
'''

CATALOG = """[[exercise]]
id = "m2.1"
title = "Put it there"
points = 10
hours = 0.5
summary = "A shelf takes items until it is full."
symbols = ["shelf.py:Shelf.put"]
tests = ["tests/exercises/test_m2_1.py"]
hints = ["How many fit?", "Compare before you append.", "len(self.items) >= ROOM is full."]
red = ["test_a_full_shelf_refuses"]
answers = "right"

[[exercise]]
id = "m2.2"
title = "Count them all"
points = 5
hours = 0.25
summary = "The sum of the items, and the largest one."
requires = ["m2.1"]
symbols = ["shelf.py:Shelf.total", "shelf.py:largest"]
tests = ["tests/exercises/test_m2_2.py"]
hints = ["What adds numbers?", "Not sum.", "math.fsum adds exactly."]
"""

TEST_1 = '''"""m2.1"""

import pytest

from m2_mini.shelf import Shelf


def test_items_are_counted() -> None:
    shelf = Shelf()
    assert shelf.put(7) == 1
    assert shelf.put(5) == 2, "I3: an item is lost"


def test_a_full_shelf_refuses() -> None:
    shelf = Shelf()
    for item in range(3):
        shelf.put(item)
    with pytest.raises(ValueError):
        shelf.put(3)
'''

TEST_2 = '''"""m2.2"""

from m2_mini.shelf import Shelf, largest


def test_the_sum() -> None:
    shelf = Shelf()
    shelf.put(2)
    shelf.put(3)
    assert shelf.total() == 5


def test_the_largest() -> None:
    shelf = Shelf()
    shelf.put(2)
    assert largest(shelf) == 2
'''

QUESTIONS = '''"""The questions of m2."""

from m2_mini.shelf import Shelf, largest


def shelf(chance):
    numbers = [chance.randrange(1000) for _ in range(chance.randint(1, 5))]
    items = Shelf()
    for number in numbers:
        try:
            about = f"put({number}) on {list(items.items)}"
            yield "items", about, [items.put(number), list(items.items)]
        except ValueError:
            yield "a full shelf", about, "ValueError"


def sums(chance):
    items = Shelf()
    items.items.extend(chance.randrange(1000) for _ in range(3))
    yield "the total", f"total of {list(items.items)}", items.total()
    yield "the largest", f"largest of {list(items.items)}", largest(items)


QUESTIONS = {"m2.1": (shelf, 30), "m2.2": (sums, 10)}
'''

MUTANT = """Mutant: one_too_many
Exercise: m2.1
Mistake: A shelf takes one item more than it has room for.
Killed-by: tests/exercises/test_m2_1.py::test_a_full_shelf_refuses

--- a/m2_mini/shelf.py
+++ b/m2_mini/shelf.py
@@ -23,3 +23,3 @@
         \"\"\"
-        if len(self.items) >= ROOM:  # the secret of put
+        if len(self.items) > ROOM:
             raise ValueError("no room")
"""

HANDOUT = """# Milestone 2: a shelf

## m2.1: Put it there

**Predict.** How many fit?

<details><summary>Answer</summary>

Three of them.
</details>

**Task.** Write it.

**Break it.** Let one more in. Which test goes red?

<details><summary>Answer</summary>

`test_a_full_shelf_refuses`.
</details>

**Checkpoint.** Why three?

## m2.2: Count them all

See [the sources](../../m2_mini/shelf.py).
"""

FILES = {
    "README.md": "# Mini\n\nThree milestones.\n",
    "Makefile": "test:\n\tpython -m pytest\n",
    "pyproject.toml": (
        '[project]\nname = "mini"\nversion = "1.2.3"\n\n'
        '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "-q"\n'
    ),
    ".gitignore": "__pycache__/\n*.pyc\n",
    "LICENSE": "Do what you like.\n",
    "m1_mini/__init__.py": '"""The first milestone."""\n',
    "m1_mini/shelf.py": '"""One thing."""\n\n\ndef put(item: int) -> int:\n    return item\n',
    "m2_mini/__init__.py": '"""The second milestone."""\n',
    "m2_mini/shelf.py": SHELF,
    "m3_mini/__init__.py": '"""The third milestone."""\n',
    "m3_mini/shelf.py": SHELF,
    "milestones/m1_mini/README.md": "# Milestone 1: one thing\n",
    "milestones/m2_mini/README.md": HANDOUT,
    "milestones/m2_mini/exercises.toml": CATALOG,
    "milestones/m2_mini/DELTA.toml": 'below = "m1_mini"\n[changed]\n"shelf.py" = "many things"\n',
    "milestones/m2_mini/mutants.patch": MUTANT,
    "milestones/m3_mini/README.md": "# Milestone 3: more\n",
    "tests/__init__.py": "",
    "tests/conftest.py": '"""No fixtures."""\n',
    "tests/exercises/__init__.py": "",
    "tests/exercises/test_m2_1.py": TEST_1,
    "tests/exercises/test_m2_2.py": TEST_2,
    "tests/questions/m2_mini.py": QUESTIONS,
}


def make(root: Path) -> Path:
    """Write the course and the real console below `root`. Return `root`."""
    write(root, FILES)
    for source in (ROOT / "milestones").rglob("*.py"):
        if any(source.is_relative_to(ROOT / folder) for folder in map(place, electives())):
            continue
        target = root / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return root


def write(root: Path, files: dict[str, str]) -> None:
    """Write files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def make_elective(root: Path) -> Path:
    """Write the course with one elective, `extra`, that has the first exercise. Return `root`."""
    catalog = CATALOG.partition('\n[[exercise]]\nid = "m2.2"')[0].replace("m2.1", "extra.1")
    folder = "milestones/electives/extra"
    files = {
        f"{folder}/__init__.py": '"""An elective."""\n',
        f"{folder}/shelf.py": SHELF,
        f"{folder}/exercises.toml": catalog.replace("test_m2_1", "test_extra_1"),
        f"{folder}/README.md": HANDOUT.replace("m2.1", "extra.1"),
        "tests/exercises/test_extra_1.py": TEST_1.replace("m2_mini", "milestones.electives.extra"),
    }
    write(make(root), files)
    return root


def called(command: ModuleType, root: Path, *arguments: str, **more: object) -> int:
    """Run a command on a tree, as `python -m milestones` does. Return its exit status."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    try:
        status: int = command.main(parser.parse_args(arguments), root=root, **more)
    except command.REFUSALS as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return status


@functools.cache
def shared_runner() -> Runner:
    """Return the one server that all tests of the course share: importing torch takes seconds."""
    runner = Runner()
    atexit.register(runner.close)
    return runner
