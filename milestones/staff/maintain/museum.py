"""Record the runs of the museum: `python -m milestones.staff.maintain.museum [EXHIBIT ...]`.

Each exhibit's change is applied to a copy of the sources. The copy runs the workload, and so do the
sources as they are. Virtual time makes a second run equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...chain import ROOT
from ...course.museum.exhibit import Exhibit, exhibits, find
from ...recording import write
from .mutants import copy

Json = dict[str, Any]


def main() -> None:
    """Record the exhibits of the command line, or all."""
    for exhibit in [find(name) for name in sys.argv[1:]] or exhibits():
        run = recorded(exhibit)
        write(exhibit.recording, run)
        sys.stdout.write(f"{exhibit.id}: {len(run['free'])} steps, {run['fault']}\n")


def recorded(exhibit: Exhibit) -> Json:
    """Run an exhibit. Return what `scene.played` does, and the right answers.

    A wrong answer is a fault too, in the step that gives its first wrong text.
    """
    with tempfile.TemporaryDirectory(prefix="ladder-museum-") as folder:
        tree = copy(ROOT, Path(folder).resolve() / "tree")
        right = play(exhibit, tree)
        assert right["fault"] is None, f"{exhibit.id}: the sources have a fault: {right['fault']}"
        change(exhibit, tree)
        run = play(exhibit, tree)
    run["right"] = right["answers"]
    wrong = first_wrong_text(run)
    if wrong and (run["fault"] is None or wrong["step"] < run["fault"]["step"]):
        run["fault"] = wrong
    return run


def change(exhibit: Exhibit, tree: Path) -> None:
    """Apply the change of an exhibit to a tree."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(exhibit.patch)], cwd=tree, env=environment,
        check=True,
    )  # fmt: skip


def play(exhibit: Exhibit, tree: Path) -> Json:
    """Run the workload of an exhibit in a tree, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "milestones.course.museum.scene"], cwd=tree,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, input=json.dumps(exhibit.workload),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    run: Json = json.loads(done.stdout)
    return run


def first_wrong_text(run: Json) -> Json | None:
    """Return the first step after which an answer is not the beginning of the right one."""
    names = {request["number"]: request["request_id"] for request in run["trace"]["requests"]}
    texts = dict.fromkeys(run["right"], "")
    for frame in run["trace"]["frames"]:
        for number, change in frame.get("requests", {}).items():
            name = names[int(number)]
            texts[name] += change.get("text", "")
            if not run["right"][name].startswith(texts[name]):
                message = f"I1: the answer of {name} is {texts[name]!r}"
                return {"step": frame["step"], "message": message}
    return None


if __name__ == "__main__":
    main()
