"""The pictures in the handouts show what the engines do now; that of the README, a recorded run."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from milestones.chain import at_least
from milestones.staff.maintain import figures, figures_ladder, ladder_runs
from milestones.staff.maintain.runs import load
from tests.conftest import MILESTONES, ROOT


def test_the_pictures_are_of_today() -> None:
    """A run is the same on every machine, so the files are equal byte for byte.

    The lanes of m5 are of recordings: the handout shows the run that the slides show.
    """
    for name, text in figures.pictures(load()).items():
        on_disk = (figures.FOLDER / name).read_text(encoding="utf-8")
        assert on_disk == text, f"{name} is old: run python -m milestones.staff.maintain.figures"


def test_the_picture_of_the_readme_is_of_its_recording() -> None:
    """The times are of a recorded run, so the picture is drawn again from the recorded data."""
    on_disk = figures_ladder.FILE.read_text(encoding="utf-8")
    drawn = figures_ladder.draw(ladder_runs.load())
    assert on_disk == drawn, "run python -m milestones.staff.maintain.figures_ladder"
    assert "milestones/docs/ladder.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_of_the_readme_can_be_shown_by_github() -> None:
    """An `<img>` has no scripts and loads nothing. Without animation it must show the end."""
    text = figures_ladder.FILE.read_text(encoding="utf-8")
    assert len(text.encode()) < 150_000
    elements = list(ElementTree.fromstring(text).iter())
    assert {e.tag.partition("}")[2] for e in elements} <= {
        "svg", "title", "style", "rect", "text", "line", "g",
    }  # fmt: skip
    assert not [name for e in elements for name in e.attrib if name.startswith("on")]
    assert text.count("://") == 1, "only the name space"
    assert "url(" not in text and "@import" not in text
    assert "@media(prefers-color-scheme:dark)" in text
    assert "@media(prefers-reduced-motion:reduce)" in text
    for lane in MILESTONES:
        name = lane.partition("_")[0]
        visible = re.findall(rf"#{name}-(\w+){{[^}}]*opacity:1}}", text)
        assert visible == [str(ladder_runs.NUM_REQUESTS), "s"], "the end is visible"


def test_all_milestones_gave_the_recorded_answers() -> None:
    """I1: the same tokens for each request. The counts of tokens agree with the steps."""
    recording = ladder_runs.load()
    assert list(recording.lanes) == MILESTONES
    first = recording.lanes[MILESTONES[0]]
    assert len(recording.arrivals) == len(first.token_ids) == ladder_runs.NUM_REQUESTS
    for milestone, lane in recording.lanes.items():
        assert lane.token_ids == first.token_ids, milestone
        assert lane.prompt_tokens == first.prompt_tokens, milestone
        assert lane.others <= ladder_runs.QUIET, f"{milestone}: the machine was not quiet"
        assert lane.seconds in recording.seconds[milestone]
        for request, tokens in enumerate(lane.token_ids):
            computed = sum(step[2 + request] for step in lane.steps)
            prefill = lane.prompt_tokens[request] - lane.cached_tokens[request]
            # The last token is not computed. m5 may have begun to compute it before it saw a stop.
            surplus = computed - prefill - (len(tokens) - 1)
            most = 1 if at_least(milestone, "m5_overlap") else 0
            assert 0 <= surplus <= most, (milestone, request)
