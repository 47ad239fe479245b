"""`path_of_a_token` finds the files that a decode token crosses, and no others."""

from __future__ import annotations

import sys

from milestones.chain import ROOT
from milestones.instruments.path_of_a_token import crossed


def test_a_token_crosses_the_parts_of_its_milestone(milestone: str) -> None:
    found = crossed(milestone)
    own = {f"{milestone}/{name}.py" for name in ("engine", "scheduler", "model_runner")}
    assert own <= found.keys(), f"the step did not enter {own - found.keys()}"
    assert all(names and (ROOT / path).is_file() for path, names in found.items())
    assert {path.split("/")[0] for path in found} == {milestone, "common"}
    assert sys.getprofile() is None, "the hook stays installed"
