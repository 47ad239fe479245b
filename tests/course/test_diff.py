"""`python -m milestones diff`: the tour shows every difference once, with its reason."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from milestones.chain import electives, parents, place, sources
from milestones.course import catalog, decks, delta
from milestones.course.diff import command as diff
from milestones.course.diff.choose import choose
from milestones.course.diff.lesson import UNDECLARED, Lesson, lesson
from milestones.course.diff.lesson_html import page
from milestones.course.diff.pointers import broken_symbols, pointers
from milestones.course.outline import Line, outline
from slides.deck import exists
from tests.conftest import MILESTONES, ROOT
from tests.helpers import mini_course
from tests.helpers.browser import tab

PAIRS = [*pairwise(MILESTONES), *((str(parents()[name]), name) for name in electives())]
OLD = '''"""A shelf."""

import os


def first() -> int:
    return 1


class Shelf:
    """Keeps things."""

    room = 3

    def put(self, item: int) -> int:
        a = 1
        b = 2
        c = 3
        d = 4
        e = 5
        f = 6
        g = 7
        h = 8
        i = 9
        return item

    def gone(self) -> None: ...

    def stays(self) -> None: ...


def last() -> int:
    return 2
'''
MORE = "# Why there is more.\n@cached\ndef more() -> int:\n    return 3\n\n\n"
NEW = (
    OLD.replace("return item", "return item + 1")
    .replace("    def gone(self) -> None: ...\n\n", "")
    .replace("def last()", f"{MORE}def last()")
)
DELTA = """below = "m1_mini"
[added]
"shelf.py:more" = "there is more"
[changed]
"shelf.py:Shelf.put" = "one is added"
[removed]
"shelf.py:Shelf.gone" = "no code <calls> it"
"""


def ladder(root: Path, new: str = NEW, declared: str = DELTA) -> Path:
    """Write two milestones of one file each. Return `root`."""
    for name, text in (
        ("m1_mini/shelf.py", OLD), ("m2_mini/shelf.py", new),
        ("milestones/m2_mini/DELTA.toml", declared),
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    return root


def run(root: Path, *arguments: str) -> int:
    return mini_course.called(diff, root, *arguments)


def test_every_line_of_a_file_is_in_one_symbol(milestone: str) -> None:
    for path in sources(milestone).values():
        text = path.read_text(encoding="utf-8")
        numbers = [x.number for part in outline(text).values() for x in part if x.text.strip()]
        lines = text.splitlines()
        assert sorted(numbers) == [n for n, x in enumerate(lines, start=1) if x.strip()], path


@pytest.mark.parametrize(("below", "above"), PAIRS)
def test_the_tour_is_the_whole_difference_and_no_more(below: str, above: str) -> None:
    """The old files, minus the lines that a tour removes, plus those it adds, are the new files."""
    tour = lesson(below, above)
    assert not [entry.name for entry in tour.entries if entry.reason == UNDECLARED]
    assert [entry.name for entry in tour.entries] == list(delta.declared(above).reasons)
    gone, come = lines_of(tour, "old", below), lines_of(tour, "new", above)
    before, after = all_lines(below), all_lines(above)
    assert not gone - before and before - gone + come == after


def outlines(milestone: str) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of each symbol of each file, with what it takes from the one it extends."""
    return delta.by_file(sources(milestone), lambda path: outline(path.read_text("utf-8")))


def all_lines(milestone: str) -> Counter[str]:
    symbols = [lines for file in outlines(milestone).values() for lines in file.values()]
    return Counter(line.text for lines in symbols for line in lines if line.text.strip())


def lines_of(tour: Lesson, side: str, milestone: str) -> Counter[str]:
    """Return the changed lines of one side, and the lines of symbols that have moved."""
    found: Counter[str] = Counter()
    kind = "removed" if side == "old" else "added"
    for part in (part for entry in tour.entries for part in entry.parts):
        lines = [x for b in part.blocks if b.kind == "change" for x in getattr(b, side)]
        if part.moved and part.kind == kind:
            symbol = part.symbol.partition(":")[2]
            lines += outlines(milestone)[part.file][symbol]
        found.update(line.text for line in lines if line.text.strip())
    return found


def test_what_is_shown_of_a_small_ladder(tmp_path: Path) -> None:
    tour = lesson("m1", "m2_mini", ladder(tmp_path))
    assert [(entry.name, entry.kind, entry.reason) for entry in tour.entries] == [
        ("shelf.py:more", "added", "there is more"),
        ("shelf.py:Shelf.put", "changed", "one is added"),
        ("shelf.py:Shelf.gone", "removed", "no code <calls> it"),
    ]
    more, put, _ = (entry.parts[0].blocks for entry in tour.entries)
    assert [line.text for line in more[0].new][:2] == ["# Why there is more.", "@cached"]
    assert [(b.kind, len(b.old), len(b.new)) for b in put] == [
        ("fold", 7, 7), ("same", 3, 3), ("change", 1, 1),
    ]  # fmt: skip
    assert "shelf.py:last" in tour.untouched, "a symbol that only moved down is shown"


def test_what_moved_to_another_file_is_named_and_not_shown(tmp_path: Path) -> None:
    new = OLD.replace("def first() -> int:\n    return 1\n\n\n", "")
    moved = "[added]\n'other.py' = 'first'\n[removed]\n'shelf.py:first' = 'it has a file'\n"
    root = ladder(tmp_path, new, 'below = "m1_mini"\n' + moved)
    (root / "m2_mini/other.py").write_text("def first() -> int:\n    return 1\n")
    added, removed = (entry.parts[0] for entry in lesson("m1", "m2", root).entries)
    assert (added.symbol, added.moved, added.blocks) == ("other.py:first", "shelf.py:first", [])
    assert (removed.moved, removed.blocks) == ("other.py:first", [])


def test_a_comment_that_differs_is_not_hidden(tmp_path: Path) -> None:
    tour = lesson("m1", "m2", ladder(tmp_path, NEW.replace("a = 1", "a = 1").replace(
        "def first() -> int:\n", "def first() -> int:\n    # one\n")))  # fmt: skip
    assert [e.name for e in tour.entries if e.reason == UNDECLARED] == ["shelf.py:first"]


def test_a_lesson_of_two_steps_has_the_reasons_of_both() -> None:
    tour = lesson("m2", "m4")
    assert {entry.milestone for entry in tour.entries} == {"m3_paged", "m4_radix"}
    assert not [entry.name for entry in tour.entries if entry.reason == UNDECLARED]


def test_plain_output_is_a_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ladder(tmp_path), "m1", "m2", "--symbol", "put") == 0
    assert capsys.readouterr().out.splitlines() == [
        "# shelf.py:Shelf.put (changed): one is added",
        "--- m1_mini/shelf.py",
        "+++ m2_mini/shelf.py",
        "@@ -22,4 +22,4 @@ Shelf.put",
        "         g = 7", "         h = 8", "         i = 9",
        "-        return item",
        "+        return item + 1",
        "",
    ]  # fmt: skip


def test_two_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ladder(tmp_path), "m1", "m2", "--symbol", "Shelf.put", "--side-by-side") == 0
    assert re.search(r"        return item +\|         return item \+ 1\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m1", "m9"), "there is no milestone 'm9'; there are m1_mini, m2_mini"),
        (("m2", "m1"), "m2_mini is not below m1_mini"),
        (("m1", "m2", "--symbol", "Shelf.pud"), "similar: shelf.py:Shelf.put"),
        (("m1", "m2", "--symbol", "stays"), "shelf.py:Shelf.stays is the same in m1_mini and"),
    ],
)
def test_refusals_say_what_there_is(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ladder(tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_file_or_class_chooses_its_symbols() -> None:
    whole = lesson("m2", "m3")
    chosen = choose(whole, "kv_pool.py")
    assert {part.file for entry in chosen.entries for part in entry.parts} == {"kv_pool.py"}
    assert [entry.name for entry in choose(whole, "PageTable").entries] == ["kv_cache.py:PageTable"]


class Page(HTMLParser):
    """The ids, links, open elements and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [v or "" for k, v in attrs if k in ("href", "src")]
        if tag not in ("meta", "wbr", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> does not close the innermost element"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(("below", "above"), PAIRS)
def test_the_page_stands_alone_and_its_links_lead_somewhere(below: str, above: str) -> None:
    """The page may lie anywhere: links to the tree are relative to its folder."""
    tour, folder = lesson(below, above), ROOT / "milestones" / "docs"
    text = page(tour, folder)
    found = Page(text)
    assert not found.open and "url(" not in text and "@import" not in text
    anchors = {link[1:] for link in found.links if link.startswith("#")}
    others = {link for link in found.links if not link.startswith("#")}
    assert anchors <= set(found.ids)
    assert len(found.ids) == len(set(found.ids)), "two elements have the same id"
    pages = {link for link in others if "README.md" in link}
    assert not [link for link in pages if not exists(folder, link)]
    assert not [link for link in others if not (folder / link.partition("#")[0]).is_file()]
    words = [*(entry.reason for entry in tour.entries), *tour.notes.values()]
    assert not [said for said in words if said.replace("`", "") not in found.text]


@pytest.mark.parametrize(("below", "above"), PAIRS)
def test_each_exercise_and_each_slide_of_code_is_named_on_the_page(below: str, above: str) -> None:
    """So are the tests that kill a mutant. Code that the lesson does not touch is on no page."""
    tour = lesson(below, above)
    text = page(tour, ROOT)
    found = {p for places in pointers(tour, ROOT).values() for p in places}
    exercises = catalog.load(above)
    assert {p.words for p in found if p.kind == "Exercise"} == {
        f"{exercise.id} {exercise.title}" for exercise in exercises
    }
    shown = Page(text).text
    assert not [e.id for e in exercises if f"Exercise {e.id} {e.title}" not in shown]
    for mutant in catalog.mutants(above):
        assert broken_symbols(mutant, ROOT), f"{mutant.name} changes no symbol"
        assert mutant.killed_by.partition("::")[2] in shown, mutant.killed_by
    slides = {s.title for s in decks.code_slides(ROOT) for at in s.places if named(at, tour)}
    assert slides and not [title for title in slides if title not in shown]


def named(shown: str, tour: Lesson) -> bool:
    """Return whether a slide shows code that the lesson touches."""
    file, _, symbol = shown.partition(":")
    entry = f"{file.removeprefix(f'{place(tour.above)}/')}:{symbol}"
    is_above = file.startswith(f"{place(tour.above)}/")
    return is_above and entry not in tour.untouched


def test_a_deck_that_is_not_built_is_named_in_words(tmp_path: Path) -> None:
    """In a student's tree there are no decks, and then no slide is named."""
    root = ladder(tmp_path)
    assert "Slide" not in Page(page(lesson("m1", "m2", root), root, root)).text
    deck = "---\ntitle: A\n---\n# One\n\n---\n# Put `it` {.small}\n"
    deck += "```code m2_mini/shelf.py:more\n```\n"
    (root / decks.DECKS).mkdir(parents=True)
    (root / decks.DECKS / "m2_mini.md").write_text(deck)
    found = Page(page(lesson("m1", "m2", root), root, root))
    assert "Slide 2 of m2_mini: Put it" in found.text
    assert all(link.startswith("#") for link in found.links)
    (root / decks.BUILT).mkdir()
    (root / decks.BUILT / "m2_mini.html").touch()
    links = Page(page(lesson("m1", "m2", root), root / "milestones", root)).links
    assert "../slides/dist/m2_mini.html#/1" in links


def test_on_a_phone_code_keeps_its_lines_and_scrolls(tmp_path: Path) -> None:
    """The page itself does not scroll sideways. On a wide screen, a note stands beside its code."""
    out = tmp_path / "out.html"
    assert run(ROOT, "m4", "--html", str(out)) == 0
    with tab(tmp_path, out.as_uri()) as browser:
        browser.resize(390, 844)
        browser.wait_until(
            "document.readyState === 'complete' && !!document.querySelector('aside')"
        )
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        lines = "[...document.querySelectorAll('.block > div')]"
        height = "parseFloat(getComputedStyle(document.querySelector('.code')).lineHeight)"
        assert not browser.evaluate(f"{lines}.filter(x => x.offsetHeight > 1.5 * {height}).length")
        beside = "(note => note.offsetLeft >= note.nextElementSibling.offsetWidth)"
        beside += "(document.querySelector('.noted > aside'))"
        assert not browser.evaluate(beside)
        browser.resize(1440, 1000)
        assert browser.evaluate(beside)


def test_the_page_shows_the_code_as_it_is(tmp_path: Path) -> None:
    """Colours and marks of changed words lose no character, and code is not read as markup."""
    new = NEW.replace("return item + 1", 'return item + f"<b>{item}</b> & \\n"')
    root = ladder(tmp_path, new)
    found = Page(page(lesson("m1", "m2", root), root, root))
    assert '        return item + f"<b>{item}</b> & \\n"\n' in found.text
    assert "no code <calls> it" in found.text
