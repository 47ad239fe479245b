"""Electives: lessons on top of the highest milestone. Each one is a package in this folder.

An elective may lie on another elective (`chain.STANDS_ON`). What is said of the milestone here then
holds for that elective: `agents` extends `priority_engine`, which extends `m5_engine`.

The folder of an elective holds what differs from the milestone below, and its page,
exercises and DELTA.toml. Its `__init__.py` continues `__path__` into the milestone:

    __path__.append(path_below(__name__))

Python looks for a module in the folders of `__path__` in order. It finds the elective's version of
a file first, and the milestone's file otherwise, which it then imports under the elective's name.
Relative imports inside that file look in the same folders. Therefore the milestone's files use the
elective's version of the other files, and every class exists once in the elective.

A file of an elective may extend the milestone's file instead of replacing it:

    from .m5_scheduler import Scheduler as M5Scheduler

    class Scheduler(M5Scheduler):

`m5_scheduler` is the milestone's `scheduler.py`, loaded as a module of the elective's package. Its
relative imports therefore find the elective's version of the other files, too. Only the elective's
`scheduler.py` may import it: every other file would get a class without the elective's methods.

An elective never imports the milestone by its name: those classes would be different ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from ..chain import ROOT, below, extended, is_elective, place


def path_below(package: str) -> str:
    """Return the folder of the package below that has the other files of a package.

    package: the name of an elective's package, or of a package inside it, such as its demo.
    """
    return paths_below(package)[0]


def paths_below(package: str) -> list[str]:
    """Return the folders of all packages below, the closest first, down to the milestone's."""
    name, *inside = package.removeprefix(f"{__name__}.").split(".")
    folders = []
    while is_elective(name):
        under = below(name)
        assert under is not None, "an elective lies on a milestone"
        folders.append(str(ROOT.joinpath(place(under), *inside)))
        name = under
    return folders


class ExtendedFiles(MetaPathFinder):
    """Finds the milestone's file behind a name such as `milestones.electives.lora.m5_engine`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.rpartition(".")
        if package.rpartition(".")[0] != __name__:
            return None
        file = extended(package.rpartition(".")[2]).get(f"{module}.py")
        return None if file is None else spec_from_file_location(fullname, file)


sys.meta_path.append(ExtendedFiles())
