"""The command `ladder`: `python -m milestones` of the tree in which it is called.

Several trees can share one environment, so it runs the tree around the working directory, and
never the one that the environment was set up for. `common/bootstrap.py` puts it there.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the console of the innermost tree around the working directory."""
    here = Path.cwd()
    for tree in (here, *here.parents):
        if (tree / "milestones" / "__main__.py").is_file():
            sys.path[0] = str(tree)
            paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes that it starts
            runpy.run_module("milestones", run_name="__main__", alter_sys=True)
            return
    sys.exit(f"{here} is in no tree of the course: go to a folder that has the folder milestones")


if __name__ == "__main__":
    main()
