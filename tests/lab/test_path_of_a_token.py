"""`path_of_a_token` finds the files that a decode token crosses, and no others."""

from __future__ import annotations

import sys

from milestones.chain import ROOT, own_name, sources
from milestones.lab.instruments.path_of_a_token import crossed


def test_a_token_crosses_the_parts_of_its_milestone(milestone: str) -> None:
    found = crossed(milestone)
    own = {name: path.relative_to(ROOT).as_posix() for name, path in sources(milestone).items()}
    for part in ("engine.py", "scheduler.py", "model_runner.py"):
        # An elective's file may change another method than those of a step, and extend m5's.
        files = {path for name, path in own.items() if own_name(name) == part}
        assert files & found.keys(), f"the step entered none of {files}"
    assert all(names and (ROOT / path).is_file() for path, names in found.items())
    others = {path for path in found if path not in own.values()}
    assert {path.split("/")[0] for path in others} == {"common"}
    assert sys.getprofile() is None, "the hook stays installed"
