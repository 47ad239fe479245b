"""Run a module of another tree: `python -m milestones.course.project.in_tree FOLDER MODULE ...`.

The process is replaced by one that starts in FOLDER, so all imports come from there. Standard input
and output stay.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Replace this process."""
    os.chdir(sys.argv[1])
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    main()
