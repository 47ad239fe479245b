"""Record what a mistake does to an answer: a mutant of the course, run in a copy of the sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milestones.course.catalog import find_mutant
from milestones.staff.maintain import mutants

from .freshness import ROOT
from .record_electives import DRAFTED

Json = dict[str, Any]
SCENE = Path(__file__).with_name("scene.py")
SECONDS = 300

# A case of m4: two prompts with the same beginning, and pages of two tokens.
M4_MUTANT = "insert_takes_the_first_pages"
M4_PROMPTS = {
    "A": "The days of the week are Monday, Tuesday,",
    "B": "The days of the week are seven. The months of the year are January, February,",
}
M4_SCENE: Json = {
    "engine": "m4_radix", "max_tokens": 12,
    "config": {"max_num_seqs": 2, "max_model_len": 64, "page_size": 2, "num_pages": 60},
}  # fmt: skip
SPECULATIVE_MUTANT = "a_wrong_draft_is_passed"
SPECULATIVE_SCENE: Json = {
    "engine": "speculative", "max_tokens": 24, "config": {"max_num_seqs": 2}, "prompts": [DRAFTED],
}  # fmt: skip


def m4_mistake(_name: str) -> Json:
    """Run B alone, after A, and after A with an empty tree, with the mistake and without."""
    first, last = M4_PROMPTS.values()
    scenes = {
        "alone": {**M4_SCENE, "prompts": [last]},
        "after_a": {**M4_SCENE, "prompts": [first, last]},
        "after_reset": {**M4_SCENE, "prompts": [first, last], "reset": True},
    }
    size = M4_SCENE["config"]["page_size"]
    told = right_and_wrong("m4_radix", M4_MUTANT, scenes)
    return {"prompts": M4_PROMPTS, "page_size": size, **told}


def speculative_mistake(_name: str) -> Json:
    """Run a text with right and wrong drafts, with the mistake and without."""
    scenes = {"text": SPECULATIVE_SCENE}
    return right_and_wrong("speculative", SPECULATIVE_MUTANT, scenes)


def right_and_wrong(engine: str, name: str, scenes: dict[str, Json]) -> Json:
    """Return what each scene gives: `right` on the sources as they are, `wrong` on the mutant."""
    mutant = find_mutant(engine, name, ROOT)
    with tempfile.TemporaryDirectory(prefix="ladder-slides-") as folder:
        tree = mutants.copy(ROOT, Path(folder).resolve() / "tree")
        right = played(scenes, tree)
        with mutants.applied(mutant, tree) as refusal:
            assert refusal is None, f"{name} does not apply: {refusal}"
            wrong = played(scenes, tree)
    return {"mutant": name, "right": right, "wrong": wrong}


def played(scenes: dict[str, Json], tree: Path) -> Json:
    """Run scenes in a tree, in a process of its own. Return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", SCENE.read_text(encoding="utf-8")], cwd=tree,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, input=json.dumps(scenes),
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: Json = json.loads(done.stdout)
    return found


MISTAKES: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "m4_mistake": (("m4_radix",), m4_mistake),
    "speculative_mistake": (("speculative",), speculative_mistake),
}
