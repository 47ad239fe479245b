"""`extras serve`: install the packages of an optional part of the project.

`pyproject.toml` lists the packages of each part, and `constraints.txt` their versions. Without a
name, the command lists the parts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import metadata

from .chain import ROOT
from .console import wide_console
from .course.delta import tomllib

EXAMPLE = "python -m milestones extras serve"
NAME = re.compile(r"[\w.-]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones extras`."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="the parts to install")
    parser.add_argument("--all", action="store_true", help="install all parts")


def main(args: argparse.Namespace) -> int:
    """Install parts, or list them all."""
    console, known = wide_console(), extras()
    wanted = list(known) if args.all else args.names
    if unknown := [name for name in wanted if name not in known]:
        console.print(f"there is no extra {unknown[0]!r}; there are: {', '.join(known)}")
        return 2
    if wanted:
        packages = [package for name in wanted for package in known[name]]
        return subprocess.run([*INSTALL, *packages]).returncode
    for name, packages in known.items():
        state = "not installed" if missing_packages(name) else "installed"
        console.print(f"{name}: {', '.join(packages)} ({state})")
    return 0


INSTALL = (sys.executable, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))


def extras() -> dict[str, list[str]]:
    """Return the requirements of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: dict[str, list[str]] = project.get("optional-dependencies", {})
    return found


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    names = [found[0] for line in extras()[extra] if (found := NAME.match(line))]
    return [name for name in names if not is_installed(name)]


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed, in any version."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def missing(extra: str) -> str | None:
    """Return a line that says how to install what an extra lacks; None if it is complete."""
    if not (names := missing_packages(extra)):
        return None
    return (
        f"{', '.join(names)} not installed: {sys.executable} -m milestones extras {extra} "
        "installs what is missing"
    )
