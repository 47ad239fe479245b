"""The museum: each exhibit is a small change of an engine, and its recorded run has the fault."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from milestones.course.museum import command
from milestones.course.museum.exhibit import Exhibit, exhibits, find
from milestones.course.museum.run_table import ranges
from milestones.staff.maintain import museum
from tests.conftest import ROOT

EXHIBITS = exhibits()
EACH = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.id)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args(words))


@EACH
def test_the_recording_has_the_fault_that_the_visitor_must_find(exhibit: Exhibit) -> None:
    recorded = exhibit.recorded()
    fault, answers, right = (recorded[name] for name in ("fault", "answers", "right"))
    assert fault["step"] == exhibit.step
    named = re.search(r"^I[1-6]", fault["message"])
    assert named is None or named[0] == exhibit.invariant
    assert answers.keys() == right.keys() == {r["id"] for r in exhibit.workload["requests"]}
    assert recorded["trace"]["meta"]["engine"] == exhibit.engine
    done = subprocess.run(["git", "apply", "--check", str(exhibit.patch)], cwd=ROOT)
    assert done.returncode == 0, "the change does not apply any more"


def test_each_bug_is_seen_by_its_users() -> None:
    """Wrong answers, a request that ends or waits without one, an exception, or lost work."""
    for exhibit in EXHIBITS:
        recorded = exhibit.recorded()
        decisions = [d for frame in recorded["trace"]["frames"] for d in frame["decisions"]]
        retractions = sum(decision["kind"] == "retract" for decision in decisions)
        wrong = recorded["answers"] != recorded["right"]
        assert wrong or recorded["ended"] or retractions > 2, exhibit.id


@pytest.mark.thorough("two runs of the model for each exhibit")
@EACH
def test_another_run_is_equal(exhibit: Exhibit) -> None:
    again, recorded = museum.recorded(exhibit), exhibit.recorded()
    for name in ("free", "fault", "answers", "right"):
        assert again[name] == recorded[name]
    for now, before in zip(again["trace"]["frames"], recorded["trace"]["frames"], strict=True):
        assert {**plain(now), "text": None} == {**plain(before), "text": None}


def plain(frame: dict[str, Any]) -> dict[str, Any]:
    """Return what a frame says about the work of a step, its decisions and the pages."""
    return {name: frame.get(name) for name in ("step", "batches", "decisions", "pages", "error")}


def test_a_visit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    listed = capsys.readouterr().out
    assert all(exhibit.id in listed for exhibit in EXHIBITS)
    assert run("stale") == 0
    shown = capsys.readouterr().out
    assert "What was seen." in shown and "it should be" in shown
    assert "+            leaf.is_free" not in shown, "the bug is not shown before it is found"
    assert run("stale-hash", "1", "I3") == 1
    assert "the first fault is later" in capsys.readouterr().out
    assert run("stale-hash", "4", "I3") == 1
    assert "the first fault is earlier" in capsys.readouterr().out
    assert run("stale-hash", "2", "I5") == 1
    assert "it is not I5, Progress" in capsys.readouterr().out
    assert run("stale-hash", "2", "i3") == 0
    told = capsys.readouterr().out
    assert "+            leaf.is_free" in told and find("stale").link in told
    page = tmp_path / "run.html"
    assert run("stale", "--player", str(page)) == 0 and "<script" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "there is no exhibit nothing; there are larger-than-the-pool, "),
        (("freed", "2", "I3"), "there is no exhibit freed; "),
        (("stale", "2"), "name a step and an invariant: stale-hash 2 I3"),
        (("stale", "2", "I9"), "name a step and an invariant"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(*words)


def test_pages_with_runs_are_ranges() -> None:
    assert ranges([1, 2, 3, 9, 7, 8]) == "1-3 9 7 8"
