"""Electives: lessons on top of the highest milestone. Each one is a package in this folder.

The folder of an elective holds the files that differ from the milestone below, and its page,
exercises and DELTA.toml. Its `__init__.py` continues `__path__` into the milestone:

    __path__.append(path_below(__name__))

Python looks for a module in the folders of `__path__` in order. It finds the elective's version of
a file first, and the milestone's file otherwise, which it then imports under the elective's name.
Relative imports inside that file look in the same folders. Therefore the milestone's files use the
elective's version of the other files, and every class exists once in the elective.

An elective never imports the milestone by its name: those classes would be different ones.
"""

from __future__ import annotations

from ..chain import ROOT, below, place


def path_below(package: str) -> str:
    """Return the folder of the milestone below that has the other files of a package.

    package: the name of an elective's package, or of a package inside it, such as its demo.
    """
    name, *inside = package.removeprefix(f"{__name__}.").split(".")
    milestone = below(name)
    assert milestone is not None, "an elective lies on a milestone"
    return str(ROOT.joinpath(place(milestone), *inside))
