"""`python -m milestones types`: check all types, with each elective as a complete package.

An elective takes most of its files from the milestone below, which mypy cannot see. So this command
makes a temporary tree of links to the sources. There, the folder of an elective has all files of
its engine. In the messages, a file that an elective does not have itself is that of the milestone.

Exit status: that of mypy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ...chain import ELECTIVES, ROOT, electives, place, sources

EXAMPLE = "python -m milestones types"
CACHE = ".mypy_cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones types`."""
    parser.add_argument("options", nargs="*", help="for mypy, after --")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Make the tree, and run mypy in it."""
    with tempfile.TemporaryDirectory(prefix="ladder-types-") as folder:
        tree = merged(root, Path(folder).resolve())
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(root / CACHE), *args.options]
        return subprocess.run(command, cwd=tree).returncode


def merged(root: Path, tree: Path) -> Path:
    """Fill a folder with links to the sources of a tree. Each elective is complete."""
    above = Path(ELECTIVES)
    for folder in (Path(), above.parent, above):
        (tree / folder).mkdir(exist_ok=True)
        own = {above.parent, above, *(Path(place(name)) for name in electives(root))}
        for path in (root / folder).iterdir():
            if folder / path.name not in own and not path.name.startswith("."):
                (tree / folder / path.name).symlink_to(path)
    for name in electives(root):
        for file, path in sources(name, root).items():
            link = tree / place(name) / file
            link.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(path, link)
    return tree
