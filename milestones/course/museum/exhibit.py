"""`Exhibit`: a bug of another project, rebuilt as a small change of one of our engines.

exhibits.toml     what was seen, the workload, the step and the invariant, the explanation
patches/          the change
recorded/         the run of the workload on the changed engine: see `scene.played`
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..delta import tomllib

Json = dict[str, Any]
FOLDER = Path(__file__).parent
FILE = FOLDER / "exhibits.toml"
PARTS = ("config", "requests", "most_steps", "reset_before")  # of a workload, besides the engine


@dataclass(frozen=True)
class Exhibit:
    """One bug. The texts are Markdown."""

    id: str
    engine: str
    title: str
    upstream: str  # the project, and the number of its thread
    link: str
    seen: str  # what users of the other project saw
    look: str  # what to look at in the run
    step: int  # the first step after which the invariant is broken
    invariant: str
    answer: str
    here: str  # the code of ours that does not have the bug
    workload: Json  # see `scene`

    @property
    def patch(self) -> Path:
        return FOLDER / "patches" / f"{self.id}.patch"

    @property
    def recording(self) -> Path:
        return FOLDER / "recorded" / f"{self.id}.json"

    def recorded(self) -> Json:
        """Return the recorded run."""
        run: Json = json.loads(self.recording.read_text(encoding="utf-8"))
        return run


def exhibits() -> list[Exhibit]:
    """Return all exhibits, in order."""
    found = []
    for table in tomllib.loads(FILE.read_text(encoding="utf-8"))["exhibit"]:
        workload = {key: table.pop(key) for key in PARTS if key in table}
        workload["engine"] = table["engine"]
        texts: Json = {
            key: value.strip() if isinstance(value, str) else value for key, value in table.items()
        }
        found.append(Exhibit(workload=workload, **texts))
    return found


def find(name: str) -> Exhibit:
    """Return an exhibit by its id or the beginning of it. Raises `ValueError`."""
    there = exhibits()
    found = [exhibit for exhibit in there if exhibit.id.startswith(name.lower())]
    if len(found) != 1:
        raise ValueError(f"there is no exhibit {name}; there are {', '.join(e.id for e in there)}")
    return found[0]
