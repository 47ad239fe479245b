"""Which packages lie below an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from milestones import chain

NAMES = ["m1_one", "m2_two", "m3_three"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in [*reversed(NAMES), "common", "milestones"]:
        (tmp_path / name).mkdir()
    return tmp_path


def test_milestones_lie_one_above_the_other(tree: Path) -> None:
    assert chain.milestones(tree) == NAMES
    assert [chain.below(name, tree) for name in NAMES] == [None, *NAMES[:2]]
    assert chain.chain("m2_two", tree) == NAMES[:2]
    assert chain.above("m1_one", tree) == NAMES[1:]
    assert chain.at_least("m2_two", "m2_two", tree) and chain.at_least("m3_three", "m1_one", tree)
    assert not chain.at_least("m1_one", "m2_two", tree)


def test_an_elective_is_one_more_entry(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies on its milestone, beside any milestone above that one."""
    known = {**chain.parents(tree), "elective": "m2_two"}
    monkeypatch.setattr(chain, "parents", lambda root: known)
    assert chain.chain("elective", tree) == [*NAMES[:2], "elective"]
    assert chain.above("m1_one", tree) == ["m2_two", "m3_three", "elective"]
    assert chain.at_least("elective", "m2_two", tree)
    assert not chain.at_least("elective", "m3_three", tree)
