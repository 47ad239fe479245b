"""The pictures in the handouts show what the engines do now; that of the README, a recorded run."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common import LoadedModel
from common.displays.palette import NUM_REQUESTS
from milestones.chain import at_least
from milestones.course.student.workload_run import SPACING, draw, jobs, watch
from milestones.drawing.memory import Moment, kind, retracted
from milestones.drawing.theme import MEANINGS, colours
from milestones.staff.maintain import figures, figures_ladder, ladder_runs
from milestones.staff.maintain.runs import load, paged
from tests.conftest import MILESTONES, ROOT
from tests.displays.test_palette import luminance

PICTURES = sorted((ROOT / "milestones").rglob("*.svg"))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load()


def test_the_pictures_are_of_today(loaded: LoadedModel) -> None:
    """A run is the same on every machine, so the files are equal byte for byte.

    The lanes of m5 are of recordings: the handout shows the run that the slides show. The results
    of benchmarks are drawn from their files.
    """
    drawn = figures.pictures(loaded)
    for name, text in drawn.items():
        on_disk = (figures.FOLDER / name).read_text(encoding="utf-8")
        assert on_disk == text, f"{name} is old: run python -m milestones.staff.maintain.figures"
    in_repository = {str(path.relative_to(figures.FOLDER)) for path in PICTURES}
    assert in_repository == {*drawn, "docs/ladder.svg"}, "each picture has a command that draws it"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_has_the_colours_of_the_player(path: Path) -> None:
    """No colour is the picture's own, in light and in dark."""
    light, _, dark = path.read_text(encoding="utf-8").partition("prefers-color-scheme:dark")
    for text, theme in ((light, "light"), (dark, "dark")):
        found = {*re.findall(r"#[0-9a-f]{3,8}\b", text)}
        assert found and found <= {*colours(theme).values()}, theme


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_on_a_request_can_be_read(theme: str) -> None:
    """Also where its colour is pale."""
    named = colours(theme)
    requests = [named[f"request{number}"] for number in range(NUM_REQUESTS)]
    assert len({*requests}) == NUM_REQUESTS
    for colour in requests:
        for ground in (colour, mixed(colour, named["panel"], 0.35)):
            assert contrast(named["chip-ink"], ground) >= 4.5, (colour, ground)
    for meaning in MEANINGS:
        if meaning != "chip-ink":
            assert contrast(named[meaning], named["panel"]) >= 2.4, meaning


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2."""
    low, high = sorted(luminance(colour) + 0.05 for colour in (one, other))
    return high / low


def mixed(colour: str, ground: str, share: float) -> str:
    """Return a colour with an opacity on a ground."""
    pairs = ((int(c[i : i + 2], 16) for c in (colour, ground)) for i in (1, 3, 5))
    return "#" + "".join(
        f"{round(share * over + (1 - share) * under):02x}" for over, under in pairs
    )


@pytest.mark.parametrize("name", ["m2_continuous/slots", "m2_continuous/batches", "m3_paged/pages"])
def test_a_letter_lies_inside_a_bar_of_its_request(name: str) -> None:
    elements = list(ElementTree.parse(figures.FOLDER / f"{name}.svg").getroot())
    kinds = [(element, (element.get("class") or "").split()) for element in elements]
    letters = [element for element, classes in kinds if "chip-ink" in classes]
    assert {str(letter.text) for letter in letters} >= {*"ABCDE"}
    for letter in letters:
        x, y = float(letter.get("x") or 0), float(letter.get("y") or 0)
        of_request = [
            bar for bar, classes in kinds if kind(str(letter.text)) in classes and bar.get("width")
        ]
        boxes = [[float(bar.get(side) or 0) for side in ("x", "y", "width", "height")]
                 for bar in of_request]  # fmt: skip
        assert any(
            left <= x and x + 9 <= left + width and top <= y - 9 and y <= top + height
            for left, top, width, height in boxes
        ), (name, letter.text)


def test_what_the_handouts_say_of_their_pictures(loaded: LoadedModel) -> None:
    """m3's picture follows H, and m2's counts the steps of two batches."""
    moments = list(watch(paged(loaded), jobs(SPACING)))
    assert retracted(moments) == {100: "H"}
    assert len(pages_of("H", moments[99])) == 9 and len(moments[99].held) == 23, "one page is free"
    before = {name: pages_of(name, moments[step]) for name, step in (("E", 62), ("F", 103))}
    assert {*pages_of("H", moments[63])} <= before["E"] and len(pages_of("H", moments[63])) == 4
    assert not pages_of("H", moments[103]) and len(pages_of("H", moments[104]) & before["F"]) == 8
    text = (ROOT / "milestones/m2_continuous/batches.svg").read_text(encoding="utf-8")
    assert "static batches: 32 steps" in text and "continuous: 22 steps" in text


def test_a_student_draws_the_picture_of_m3(tmp_path: Path) -> None:
    draw("m3_paged", "tiny-llama", tmp_path / "mine.svg")
    ours = (figures.FOLDER / "m3_paged/pages.svg").read_text(encoding="utf-8")
    assert (tmp_path / "mine.svg").read_text(encoding="utf-8") == ours


def pages_of(name: str, moment: Moment) -> set[int]:
    return {page for page, (owner, _) in moment.held.items() if owner == name}


def test_the_picture_of_the_readme_is_of_its_recording() -> None:
    """The times are of a recorded run, so the picture is drawn again from the recorded data."""
    on_disk = figures_ladder.FILE.read_text(encoding="utf-8")
    drawn = figures_ladder.draw(ladder_runs.load())
    assert on_disk == drawn, "run python -m milestones.staff.maintain.figures_ladder"
    assert "milestones/docs/ladder.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_what_its_picture_shows() -> None:
    recording = ladder_runs.load()
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"**{figures_ladder.result(recording)}.**" in page
    ends = {name.partition("_")[0]: sorted(lane.ends) for name, lane in recording.lanes.items()}
    third, first = f"{ends['m1'][2]:.1f} s", f"{ends['m3'][0]:.1f} s"
    assert f"At {third}, m1 has finished three chats and m2 none" in page
    assert ends["m2"][0] > ends["m1"][2], "then m2 has finished no chat"
    assert f"its first chat ends at {first}" in page and ends["m3"][0] < ends["m2"][0]
    assert 0.8 <= ends["m5"][-1] / ends["m4"][-1] <= 1.25, "m5 takes about as long as m4"


def test_the_picture_of_the_readme_can_be_shown_by_github() -> None:
    """An `<img>` has no scripts and loads nothing. At first, and without animation, it must show
    the end."""
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
        at_first = re.findall(rf"@keyframes {name}-(\w+){{0%{{opacity:1}}", text)
        assert at_first == visible, "the end is visible at first"
    period = float(re.findall(r"g{animation:([\d.]+)s", text)[0])
    moved = f"{{transform:translateX({figures_ladder.FIELD}px)}}"
    starts = float(re.findall(rf"@keyframes cover{{0%,([\d.]+)%{re.escape(moved)}", text)[0])
    assert 2.5 < period * starts / 100 < 3.5, "seconds of the end, before the picture plays"


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
