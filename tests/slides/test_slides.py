"""The decks: the code, figures and links on a slide exist, are up to date, and fit on the slide.

One test visits every slide in a browser. Without Chromium that test is skipped. With
LADDER_BROWSER=1 in the environment it fails instead.
"""

from __future__ import annotations

import ast
import html
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from common.tracing.player import part
from milestones.chain import electives
from milestones.course.diff.lesson import lesson
from milestones.recording import write
from slides import (
    build,
    charts,
    facts,
    ladder,
    record,
    sources,
)
from slides.__main__ import main
from slides.browser import Browser
from slides.deck import Deck, Reader, exists
from slides.freshness import fingerprint
from slides.page import INKS, page
from slides.record_electives import GRAMMARS
from slides.record_mistakes import MISTAKES
from slides.sources import BuildError
from slides.stops import Walk
from tests.conftest import MILESTONES, ROOT, shared_model
from tests.helpers.browser import find_browser
from tests.helpers.deselected import thorough_except

DECKS = sorted((ROOT / "slides" / "decks").glob("*.md"))
SCHEDULER = "m2_continuous/scheduler.py:Scheduler"
BODY = "---\ntitle: T\nabout: A\n---\n"
NOTES = "\nNote: 40 min\n\n" + "Say what there is to say about it. " * 4


@pytest.fixture(scope="module")
def decks() -> dict[str, Deck]:
    return {path.stem: Reader(path).deck() for path in DECKS}


def test_a_deck_for_each_milestone(decks: dict[str, Deck]) -> None:
    assert list(decks) == ["0_opening", *sorted([*MILESTONES, "electives"])]
    for deck in decks.values():
        if deck.name != "electives":
            assert 20 <= len(deck.slides) <= 30, f"{deck.name} has {len(deck.slides)} slides"
        assert sum("predict" in slide.classes for slide in deck.slides) >= 2, deck.name
        assert any("trap" in slide.classes for slide in deck.slides), deck.name


def test_each_elective_of_the_deck_has_a_few_slides(decks: dict[str, Deck]) -> None:
    """A part begins with a slide of class `.title` that names the elective's package."""
    parts: dict[str, int] = {}
    for slide in decks["electives"].slides:
        if "title" in slide.classes:
            (name,) = (n for n in electives() if f"<code>{n}</code>" in slide.body + slide.title)
            parts[name] = 0
        parts[name] += 1
    assert parts.keys() == set(electives())
    assert all(5 <= count <= 8 for count in parts.values()), parts


@pytest.mark.parametrize(
    ("below", "above"), [("m2_continuous", "m3_paged"), ("m4_radix", "m5_overlap")]
)
def test_a_deck_walks_the_stops_of_its_lesson(
    decks: dict[str, Deck], below: str, above: str
) -> None:
    """The table has the titles of `diff`, and each stop with code on slides is named in order."""
    stops = lesson(below, above).stops
    shown = [slide.body for slide in decks[above].slides]
    (table,) = [body for body in shown if "--stop 1" in body]
    titles = re.findall(r"<tr><td>(\d)</td><td>(.*?)</td>", table)
    assert titles == [(str(stop.number), html.escape(stop.title)) for stop in stops]
    numbers = re.findall(r" · stop (\d)</figcaption>", "".join(shown))
    assert numbers and numbers == sorted(numbers)


def test_a_slide_cannot_go_back_to_an_earlier_stop() -> None:
    walk = Walk("m2_continuous", "m3_paged")
    assert walk.caption("m3_paged/kv_cache.py:PageTable.append") == " · stop 1"
    assert walk.caption("m3_paged/kernels.py:_attend") == " · stop 5"
    assert walk.caption("m2_continuous/kv_cache.py:KVCacheManager") == ""
    with pytest.raises(BuildError, match="of stop 3 .Admission and retraction., but a"):
        walk.caption("m3_paged/admission.py:Admission.fits")
    with pytest.raises(BuildError, match="speculative has no stops"):
        Walk("m5_overlap", "speculative")


def test_decks_are_chosen_by_name() -> None:
    assert [path.stem for path in build.chosen(["m3_paged", "m2"])] == ["m2_continuous", "m3_paged"]
    assert build.chosen([]) == DECKS
    with pytest.raises(BuildError, match="no such deck: m9; there are 0_opening, electives, m1_"):
        build.chosen(["m2", "m9"])


def test_each_shape_of_a_picture_has_a_colour(decks: dict[str, Deck]) -> None:
    """A shape of a class that the theme does not know is black, and its text cannot be read."""
    known = set(re.findall(r"\.([\w-]+)", (ROOT / "slides/theme.css").read_text()))
    for deck in decks.values():
        for number, slide in enumerate(deck.slides, 1):
            kinds = re.findall(r'<(?:rect|path|circle|line)[^>]* class="([^"]*)"', slide.body)
            unknown = set(" ".join(kinds).split()) - known
            assert not unknown, f"{deck.name}, slide {number}: no style for {unknown}"


def test_the_theme_has_no_colours_of_its_own() -> None:
    """All of them are variables: the player's, or inks that `page.py` adds to these."""
    theme = (ROOT / "slides/theme.css").read_text()
    assert not re.search(r"#[0-9a-f]{3,8}\b|\b(?:rgba?|hsla?)\(|: *(?:white|black|red)\b", theme)
    known = set(re.findall(r"(--[\w-]+):", part("style.css") + theme))
    inks = set(re.findall(r"(--[\w-]+):", INKS["light"]))
    set_by_pages = {"--hue", "--grow", "--size", "--text"}
    used = set(re.findall(r"var\((--[\w-]+)", theme))
    assert used <= known | inks | set_by_pages, used - known - inks - set_by_pages


def test_code_of_a_lesson_shows_nothing_of_the_search_for_failures(decks: dict[str, Deck]) -> None:
    """Which request makes a forward fail is found in the shell: no lesson is about it."""
    source = (ROOT / "common/failure_search.py").read_text(encoding="utf-8")
    (search,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    names = {search.name, "failure_search", "isolation", "_keep_only_allowed"}
    for deck in decks.values():
        for number, slide in enumerate(deck.slides, 1):
            code = "".join(re.findall(r'<figure class="code">.*?</figure>', slide.body, re.DOTALL))
            shown = names & set(re.findall(r"\w+", re.sub(r"<[^>]*>", "", code)))
            assert not shown, f"{deck.name}, slide {number}: {shown}"


def test_code_begins_outside_of_a_docstring() -> None:
    inside = ["    of all tokens.", '    """', "    return []"]
    with pytest.raises(BuildError, match="inside a docstring"):
        sources.as_html([sources.Line(text) for text in inside])
    lines = sources.mutant_lines("hybrid_memory", "only_the_last_page_is_asked_for")
    assert lines[0].text.startswith("for count in"), "the statement after the docstring"
    lines = sources.mutant_lines("priority", "a_source_is_dropped")
    assert not lines[-1].text.lstrip().startswith("def "), "the next method is left out"


def test_an_engine_is_a_stack_of_its_files() -> None:
    assert ladder.stack("m1_single") == ["forward"] * 4
    assert ladder.stack("m2_continuous").count("forward") == 3
    assert ladder.stack("m5_overlap").count("frame") > 0
    assert len(ladder.stack("lora")) == len(ladder.stack("m5_overlap")) + 6


def test_a_page_holds_all_it_needs(decks: dict[str, Deck]) -> None:
    text = page(decks["m2_continuous"])
    loads = r"<(?:link|img|iframe)\b|<script[^>]*\bsrc=|@import|url\((?!#|data:)"
    assert not re.search(loads, text.partition("<script>")[0])
    assert text.count('<aside class="notes">') == len(decks["m2_continuous"].slides)


@pytest.mark.thorough("`make slides` does the same")
def test_every_slide_fits_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slides fit in both themes, a PDF can be printed, and the speaker's view has the notes."""
    monkeypatch.setattr(build, "OUTPUT", tmp_path)
    built = build.build()
    with Browser(find_browser()) as browser:
        wrong = [f"{p.stem}: {problem}" for p in built for problem in build.problems(browser, p)]
        assert not wrong, "\n".join(wrong)
        path, deck = next(iter(built.items()))
        build.print_pdf(browser, path, deck)
        assert "Welcome" in speaker_view(browser, path)
        for answers in (True, False):
            build.open_pages(browser, path, answers)
            visible = browser.evaluate(
                "[...document.querySelectorAll('.predict .answer')].map(answer =>"
                " getComputedStyle(answer).visibility)"
            )
            assert visible and set(visible) == {"visible" if answers else "hidden"}
        # The check can fail: it finds a text that leaves its slide, and code that is too small or
        # too close to its border.
        browser.open(path.as_uri())
        browser.evaluate(
            "document.querySelectorAll('.body p')[0].style.marginTop = '700px';"
            "document.querySelector('pre code').style.fontSize = '12px';"
            "document.querySelector('figure.code').style.width = 'max-content';"
            "for (const line of document.querySelectorAll('figure.code .line'))"
            "  line.style.paddingRight = '9px'"
        )
        seen = browser.evaluate((build.HERE / "check.js").read_text(encoding="utf-8"))["problems"]
        for found in ("sticks out", "12 px", "code ends 9 px before its border, not 16"):
            assert any(found in line for line in seen), found


def speaker_view(browser: Browser, path: Path) -> str:
    """Open the speaker's window as a speaker does. Return the notes that it shows."""
    browser.open(path.as_uri())
    return str(
        browser.evaluate(
            "new Promise(done => { const open = window.open; let view;"
            " window.open = (...a) => (view = open.apply(window, a));"
            " Reveal.getPlugin('notes').open();"
            " const look = () => {"
            "   const notes = view?.document.querySelector('.speaker-controls-notes .value');"
            "   const text = notes?.textContent.trim();"
            "   text ? done(text) : setTimeout(look, 50); };"
            " look(); })"
        )
    )


def deck_of(tmp_path: Path, slide: str) -> Deck:
    path = tmp_path / "x.md"
    path.write_text(BODY + slide, encoding="utf-8")
    return Reader(path).deck()


@pytest.mark.parametrize(
    ("slide", "complaint"),
    [
        (f"# S\n```code {SCHEDULER}.gone\n```" + NOTES, "no 'gone'"),
        ("# S\n```code m2_continuous/gone.py:f\n```" + NOTES, "gone.py is gone"),
        (f"# S\n```code {SCHEDULER}.schedule\nmark: no such line\n```" + NOTES, "'no such line'"),
        (f"# S\n```boxes\n{SCHEDULER} @0,0 = gone()\n```" + NOTES, "no gone"),
        ("# S\n```boxes\na @0,0 = x\nb @0.1,0 = y\n```" + NOTES, "a and b overlap"),
        ("# S\n```sequence\nactors: a, b\na -> b: " + 60 * "w " + "\n```" + NOTES, "line of life"),
        ("# S\n```invariants\nI1 | One answer\n```" + NOTES, "needs five parts"),
        ("# S\n{{ladder.engines.gone}}" + NOTES, "gone"),
        ("# S\n```figure steps nothing\n```" + NOTES, "no nothing.json"),
        ("# S\n[dead](../nothing.md)" + NOTES, "nothing at ../nothing.md"),
        ("# S\n" + "```code m4_radix/radix_cache.py:RadixCache\n```" + NOTES, "lines of code"),
        ("# S\ntext", "needs notes"),
        ("# S\ntext" + NOTES.replace("40", "4"), "4 minutes"),
    ],
)  # fmt: skip
def test_what_a_build_refuses(tmp_path: Path, slide: str, complaint: str) -> None:
    with pytest.raises(BuildError, match=re.escape(complaint)):
        deck_of(tmp_path, slide)


def test_links_to_headings() -> None:
    decks = ROOT / "slides" / "decks"
    assert exists(decks, "../../CONTRIBUTING.md#the-invariants")
    assert not exists(decks, "../../CONTRIBUTING.md#nothing")


def test_a_stale_figure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = facts.recorded("m2_example")
    content["fingerprint"] = "of other code"
    monkeypatch.setattr(facts, "DATA", tmp_path)
    facts.data.cache_clear()
    write(tmp_path / "m2.json", {"m2_example": content})
    with pytest.raises(BuildError, match="stale"):
        facts.data("m2_example")
    content["sources"].append("m2_continuous/no_such_file.py")
    content["fingerprint"] = fingerprint(content["sources"][:-1])
    write(tmp_path / "m2.json", {"m2_example": content})
    with pytest.raises(BuildError, match="stale"):  # a file that is gone is a change as well
        facts.data("m2_example")
    facts.data.cache_clear()


def test_a_run_is_recorded_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "DATA", tmp_path)
    monkeypatch.setitem(record.RUNS, "m2_one", (("m2_continuous",), lambda name: {"it": name}))
    monkeypatch.setitem(record.RUNS, "m2_two", ((), lambda name: {"it": name}))
    for name in ("m2_two", "m2_one", "m2_two"):
        record.record(name)
    assert [*json.loads((tmp_path / "m2.json").read_text())] == ["m2_one", "m2_two"]
    assert [facts.data(name)["it"] for name in ("m2_one", "m2_two")] == ["m2_one", "m2_two"]
    facts.data.cache_clear()


def test_the_command_records_the_runs_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(record, "record", made.append)
    for arguments, names in ((["m2_example"], ["m2_example"]), ([], [*record.RUNS])):
        monkeypatch.setattr("sys.argv", ["slides", "record", *arguments])
        assert main() == 0 and made == names
        made.clear()


def test_a_difference_shows_what_goes_before_what_comes() -> None:
    lines = sources.difference(
        "m1_single/scheduler.py:Scheduler.schedule", "m2_continuous/scheduler.py:Scheduler.schedule"
    )
    kinds = [line.kind for line in lines]
    assert kinds[0] == "same" and kinds.index("del") < kinds.index("add")
    new = [line.text for line in lines if line.kind != "del"]
    assert new == sources.code_of("m2_continuous/scheduler.py:Scheduler.schedule")


SLOW = {
    "m3_scores", "priority_waits", "agents_policies", "disaggregated_latencies", *MISTAKES
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        *thorough_except(
            {*record.EQUAL} - SLOW,
            [name for name in record.EQUAL if name not in GRAMMARS],
            "the real model, or engines in copies of the sources",
        ),
        *(pytest.param(name, marks=pytest.mark.extra("grammar")) for name in GRAMMARS),
    ],
)  # fmt: skip
def test_another_run_is_equal(name: str) -> None:
    """Another run gives the same steps, states and counters, and the same scores up to rounding."""
    shown = facts.recorded(name)
    make = record.RUNS[name][1]
    is_example = make in (record.example, record.plan_example)
    again = make(name, shared_model(record.EngineConfig().model)) if is_example else make(name)
    again = json.loads(json.dumps(again))
    assert again.pop("scores", None) == pytest.approx(shown.pop("scores", None), abs=0.011)
    assert again == {key: shown[key] for key in again}


def test_names_of_curves_that_end_together_stand_apart() -> None:
    axes = charts.Axes([0, 10], [0, 10], "x", "y")
    for name, end in (("low", 1.0), ("same", 5.0), ("again", 5.0), ("near", 5.2)):
        axes.curve([0, 10], [0, end], "plan", name, dots=False)
    drawn = axes.picture("some curves")
    places = {
        name: float(y) for y, name in re.findall(r'y="([\d.]+)"[^>]*>(low|same|again|near)<', drawn)
    }
    by_height = sorted(places.values())
    assert len(by_height) == 4 and all(b - a >= 22 for a, b in pairwise(by_height))
    assert places["near"] < places["same"] < places["again"] < places["low"]
