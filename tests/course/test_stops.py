"""The stops of a large lesson: declared in `DELTA.toml`, shown by `diff`, listed in the handout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from milestones.chain import course_place, electives, own_name, place, sources
from milestones.course import catalog, delta
from milestones.course.diff import lesson_text
from milestones.course.diff.choose import choose_stop
from milestones.course.diff.lesson import Lesson, Stop, lesson
from milestones.course.diff.lesson_html import page
from milestones.course.diff.lesson_text import counts, plain
from milestones.course.release.student_tree import without_entries
from tests.conftest import MILESTONES, ROOT
from tests.course.test_diff import DELTA, NEW, Page, ladder, run
from tests.course.test_prose import handout, table

LARGE = [  # and the number of stops
    ("m1_single", "m2_continuous", 4),
    ("m2_continuous", "m3_paged", 6),
    ("m3_paged", "m4_radix", 4),
    ("m4_radix", "m5_overlap", 3),
    ("m5_overlap", "disaggregated", 4),
    ("m5_overlap", "hybrid_memory", 5),
    ("m5_overlap", "lora", 4),
    ("m5_overlap", "priority", 4),
    ("m5_overlap", "structured_output", 5),
    ("m5_overlap", "vision", 4),
    ("priority", "agents", 3),
]
LONG = 1000  # added and removed lines of an elective, from which on it needs stops
STOPS = """
[[stop]]
title = "Put & take"
teaches = "A shelf `gives` things back."
symbols = [
    "shelf.py:Shelf.gone",
    "shelf.py",
]

[[stop]]
title = "More of it"
symbols = ["shelf.py:more"]
"""
DIVIDED = DELTA.replace("\n", f"\n{STOPS}\n", 1)


def names(tour: Lesson) -> list[tuple[int, str, list[str]]]:
    return [(stop.number, stop.title, [e.name for e in stop.entries]) for stop in tour.stops]


def test_the_closest_name_decides_and_the_stops_give_the_order(tmp_path: Path) -> None:
    tour = lesson("m1", "m2", ladder(tmp_path, declared=DIVIDED))
    assert names(tour) == [
        (1, "Put & take", ["shelf.py:Shelf.gone", "shelf.py:Shelf.put"]),
        (2, "More of it", ["shelf.py:more"]),
    ]


def test_what_no_stop_names_comes_last(tmp_path: Path) -> None:
    """An entry without a stop, and a comment that differs without being declared."""
    new = NEW.replace("def first()", "# First.\ndef first()")
    text = DIVIDED.replace('    "shelf.py",\n', "")
    assert names(lesson("m1", "m2", ladder(tmp_path, new, text))) == [
        (1, "Put & take", ["shelf.py:Shelf.gone"]),
        (2, "More of it", ["shelf.py:more"]),
        (3, "The rest", ["shelf.py:Shelf.put", "shelf.py:first"]),
    ]


def test_without_a_stop_an_overview_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ladder(tmp_path, declared=DIVIDED), "m1", "m2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "m1_mini to m2_mini, in 2 stops",
        "",
        "stop              lines  symbols",
        "   1  Put & take  +1 -2        2",
        "   2  More of it  +4 -0        1",
        "      together    +5 -2        3",
        "",
        "python -m milestones diff m1 m2 --stop 1",
        "shows a stop; --stop all shows all of them, --html FILE writes them as a page.",
    ]


@pytest.mark.parametrize("wanted", ["2", "More of it", "more"])
def test_one_stop(wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ladder(tmp_path, declared=DIVIDED), "m1", "m2", "--stop", wanted) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "# Stop 2: More of it (lines +4 -0, symbols 1)"
    assert [line for line in out if line.startswith("# ")][1:] == [
        "# shelf.py:more (added): there is more"
    ]
    assert "+    return 3" in out and "+        return item + 1" not in out


def test_all_stops_are_the_whole_tour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ladder(tmp_path, declared=DIVIDED)
    assert run(root, "m1", "m2", "--stop", "all") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == list(plain(lesson("m1", "m2", root)))
    assert [line[:8] for line in lines if line.startswith("# Stop")] == ["# Stop 1", "# Stop 2"]


@pytest.mark.parametrize(("below", "above", "count"), LARGE)
def test_whole_files_come_in_the_order_of_the_stops(
    below: str, above: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file that differs comes once, and the demo never. One name means the milestone below."""
    assert run(ROOT, above, "--files") == 0
    text = capsys.readouterr().out
    old, new = sources(below), sources(above)
    differs = [f for f in new if f not in old or old[f].read_bytes() != new[f].read_bytes()]
    expected = {f for f in differs if own_name(f) == f and not f.startswith("demo/")}
    shown = headers(text, above)
    assert sorted(shown) == sorted(expected)
    first, *_ = lesson(below, above).stops[0].entries
    assert shown[0] == first.name.partition(":")[0]


def headers(text: str, engine: str) -> list[str]:
    """Return the names of the new files of a diff, inside their engine."""
    named = re.findall(r"^\+\+\+ (\S+)$", text, re.MULTILINE)
    return [name.removeprefix(f"{place(engine)}/") for name in named]


def test_whole_files_are_a_normal_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ladder(tmp_path, declared=DIVIDED)
    assert run(root, "m2", "--files") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--- m1_mini/shelf.py", "+++ m2_mini/shelf.py"]
    changed = [line[1:] for line in lines[2:] if line.startswith("+")]
    assert "        return item + 1" in changed and not [x for x in lines if x.startswith("#")]
    assert run(root, "m1", "--files") == 2
    assert "m1 is the lowest milestone" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [False, True])
def test_a_person_sees_titles_reasons_and_code(tmp_path: Path, columns: bool) -> None:
    """The title of each stop is shown once. Lines that are far from a change are not shown."""
    console = Console(
        record=True, width=120, force_terminal=True, file=(tmp_path / "out").open("w")
    )
    tour = lesson("m1", "m2", ladder(tmp_path / "ladder", declared=DIVIDED))
    lesson_text.show(tour, console, columns=columns)
    text = console.export_text()
    assert text.count("Stop 1: Put & take (lines +1 -2, symbols 2)") == 1
    assert text.index("Stop 2: More of it") < text.index("# shelf.py:more (added)")
    assert text.count("# Stop 2: More of it") == 1
    assert "# shelf.py:Shelf.put (changed): one is added" in text
    assert text.count("return item + 1") == 1 and "a = 1" not in text


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("3", "no stop has this number; choose one of: 1 Put & take; 2 More of it"),
        ("shelf", "no stop has this in the title; choose one of: 1 Put & take; 2 More of it"),
        ("t", "several stops have this in the title; choose one of: 1 Put & take; 2 More of it"),
    ],
)
def test_a_wrong_stop_gets_the_names_of_the_stops(
    wanted: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ladder(tmp_path, declared=DIVIDED), "m1", "m2", "--stop", wanted) == 2
    assert capsys.readouterr().err == f"--stop {wanted!r}: {message}\n"


def test_a_lesson_that_is_not_divided_has_no_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ladder(tmp_path)
    assert run(root, "m1", "m2", "--stop", "1") == 2
    assert "m1_mini to m2_mini has no stops" in capsys.readouterr().err
    assert run(root, "m1", "m2") == 0
    assert capsys.readouterr().out.startswith("# shelf.py:more (added): there is more\n--- /dev")


def test_a_symbol_is_shown_without_its_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ladder(tmp_path, declared=DIVIDED), "m1", "m2", "--symbol", "more") == 0
    assert capsys.readouterr().out.startswith("# shelf.py:more (added): there is more\n--- /dev")


def test_the_page_has_a_section_for_each_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    root = ladder(tmp_path / "ladder", declared=DIVIDED)
    assert run(root, "m1", "m2", "--html", str(out)) == 0
    assert "2 stops with 3 entries" in capsys.readouterr().err
    text = out.read_text(encoding="utf-8")
    contents, first, second = text.partition("</header>")[0], *re.findall(
        r"(?s)<section id=\"stop-\d\">(.*?)</section>", text
    )  # fmt: skip
    for title in ("Put &amp; take", "More of it"):
        assert re.search(rf'<table class="contents">.*<a href="#stop-\d">{title}</a>', contents)
    assert "Shelf.gone" in first and "Shelf.put" in first and "return 3" not in first
    assert "<p>A shelf <code>gives</code> things back.</p>" in first
    assert "1. Put &amp; take" in first and "Lines +1 -2, symbols 2." in first
    assert "2. More of it" in second and "Shelf.put" not in second
    links = Page(text).links
    assert {"#stop-1", "#stop-2"} <= set(links)


def test_the_page_of_one_stop_has_no_other(tmp_path: Path) -> None:
    tour = choose_stop(lesson("m1", "m2", ladder(tmp_path, declared=DIVIDED)), "1")
    text = page(tour, tmp_path, tmp_path)
    assert text.count("<section") == 1 and "More of it" not in text
    assert not Page(text).open


def test_a_removed_helper_leaves_its_stop(tmp_path: Path) -> None:
    """A student's DELTA.toml names no helper that was cut. All of its stops can still be read."""
    text = without_entries(DIVIDED, ["shelf.py:Shelf.gone"])
    assert "Shelf.gone" not in text
    found = delta.declared("m2_mini", ladder(tmp_path, declared=text))
    assert found.stops == {"Put & take": ("shelf.py:Shelf.put",), "More of it": ("shelf.py:more",)}


@pytest.mark.parametrize(("below", "above", "count"), LARGE)
def test_every_name_of_a_stop_has_a_symbol_of_its_own(below: str, above: str, count: int) -> None:
    """No name in a stop is without effect, and the stops have all entries of the tour, once."""
    path = ROOT / course_place(above) / "DELTA.toml"
    tables = delta.tomllib.loads(path.read_text(encoding="utf-8"))["stop"]
    tour = lesson(below, above)
    assert [stop.number for stop in tour.stops] == list(range(1, count + 1))
    assert [stop.title for stop in tour.stops] == [*(t["title"] for t in tables), delta.REST]
    assert len(tour.entries) == len({entry.name for entry in tour.entries})
    for stop, declared_stop in zip(tour.stops, tables, strict=False):
        for name in declared_stop["symbols"]:
            own = [entry.name for entry in stop.entries if delta.covers(name, entry.name)]
            others = [other for other in declared_stop["symbols"] if len(other) > len(name)]
            left = [e for e in own if not any(delta.covers(other, e) for other in others)]
            assert left, f"{path}: {name!r} in stop {stop.title!r} adds nothing to the stop"


@pytest.mark.parametrize(("below", "above", "count"), LARGE)
def test_the_numbers_of_lines_are_those_of_the_diff(below: str, above: str, count: int) -> None:
    for stop in lesson(below, above).stops:
        shown = list(plain(Lesson(below, above, [stop])))
        added = [x for x in shown if x.startswith("+") and not x.startswith("+++ ")]
        removed = [x for x in shown if x.startswith("-") and not x.startswith("--- ")]
        assert counts(stop)[0] == f"+{len(added)} -{len(removed)}"


@pytest.mark.parametrize(("below", "above", "count"), LARGE)
def test_each_exercise_is_in_one_stop_of_the_handout(below: str, above: str, count: int) -> None:
    """`test_catalog.py` checks that the table of the handout is that of `DELTA.toml`."""
    rows = table(handout(above), "| stop |")
    tour = lesson(below, above)
    assert [row["stop"] for row in rows] == [f"{stop.number}. {stop.title}" for stop in tour.stops]
    assert all(row["it teaches"] for row in rows)
    ids = [name for row in rows for name in re.findall(r"\[(\w+\.\d)\]", row["exercises"])]
    assert sorted(ids) == [exercise.id for exercise in catalog.load(above)]


def test_a_long_lesson_has_stops() -> None:
    """So has each milestone. A lesson that gets stops is tested, and its handout lists them."""
    longer = {name for name in electives() if num_lines(name) > LONG}
    divided = {name for name in (*MILESTONES, *electives()) if has_stops(name)}
    assert divided == {above for _, above, _ in LARGE} == {*MILESTONES[1:], *longer}


def num_lines(name: str) -> int:
    whole = Stop(0, "", lesson(MILESTONES[-1], name).entries)
    return sum(whole.num_lines)


def has_stops(name: str) -> bool:
    return name != MILESTONES[0] and bool(delta.declared(name).stops)
