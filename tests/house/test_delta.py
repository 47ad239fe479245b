"""A milestone differs from the milestone below only by what its DELTA.toml declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from milestones.chain import below, own_name, sources
from milestones.course import catalog, delta
from tests.conftest import MILESTONES
from tests.course.test_diff import DELTA, ladder


@pytest.mark.electives
@pytest.mark.since("m2_continuous")
def test_every_difference_is_declared(milestone: str) -> None:
    says = delta.declared(milestone)
    assert says.below == below(milestone)
    assert not (problems := delta.problems(says, delta.found_in(milestone))), "\n".join(problems)


@pytest.mark.electives
@pytest.mark.since("m2_continuous")
def test_each_note_names_a_symbol_of_a_new_file(milestone: str) -> None:
    says = delta.declared(milestone)
    problems = delta.problems_of_notes(says, sources(milestone))
    assert not problems, "\n".join(problems)


def test_a_note_on_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(): ...\n")
    (tmp_path / "b.py").write_text("def g(): ...\n")
    files = {name: tmp_path / name for name in ("a.py", "b.py")}
    notes = dict.fromkeys(["a.py:f", "a.py:gone", "b.py:g"], "why")
    added = frozenset({"a.py", "b.py:g"})
    says = delta.Delta("m", added, frozenset(), frozenset(), {}, notes=notes)
    assert delta.problems_of_notes(says, files) == [
        "a.py:gone has a note, but does not exist",
        "b.py:g has a note, but is in no file or class that is added",
    ]


@pytest.mark.parametrize("name", MILESTONES[1:])
def test_what_a_new_file_defines_has_a_note(name: str) -> None:
    """Classes, public functions and the symbols of exercises do. The demo is not the lesson."""
    says, files = delta.declared(name), sources(name)
    new = [entry for entry in says.added if ":" not in entry and not entry.startswith("demo/")]
    wanted = {s for e in catalog.load(name) for s in e.symbols if s.partition(":")[0] in new}
    for file in new:
        public = [s for s in delta.symbols(files[file]) if re.fullmatch(r"[A-Za-z]\w*", s)]
        wanted |= {f"{file}:{symbol}" for symbol in public}
    assert wanted <= says.notes.keys(), f"without a note: {sorted(wanted - says.notes.keys())}"


@pytest.mark.since("m2_continuous")
def test_an_undeclared_line_is_named(milestone: str, tmp_path: Path) -> None:
    """One line is changed, in a method that the lesson does not touch."""
    files, says = sources(milestone), delta.declared(milestone)
    calls = {"add_request": "add_request(request)", "check_invariants": "check_invariants()"}
    symbols = {f"engine.py:EngineCore.{name}": call for name, call in calls.items()}
    symbol = next(symbol for symbol in symbols if symbol not in says.reasons)
    line = f"self.scheduler.{symbols[symbol]}"
    engines = {file: files[file].read_text() for file in files if own_name(file) == "engine.py"}
    (file,) = [file for file, source in engines.items() if line in source]
    engine = files[file] = tmp_path / "engine.py"
    engine.write_text(engines[file].replace(line, f"return {line}"))
    problems = delta.problems(says, delta.compared(says.below, sources(says.below), files))
    assert problems == [f"{symbol} is changed, but not declared"]


def test_comments_and_layout_do_not_count(tmp_path: Path) -> None:
    for name, body in (
        ("a", "x = 1\ndef f():\n    return 1\n"),
        ("b", "x  =  1 # one\n\ndef f(): return 1\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.py").write_text(body)
    a, b = ({"engine.py": tmp_path / name / "engine.py"} for name in "ab")
    real = delta.compared("a", a, b)
    assert not real.added | real.changed | real.removed


def test_what_is_declared_and_not_there_is_a_problem() -> None:
    nothing = delta.Delta("m", frozenset(), frozenset(), frozenset(), {})
    says = delta.Delta("m", frozenset({"a.py"}), frozenset({"b.py:f"}), frozenset(), {})
    assert len(delta.problems(says, nothing)) == 2


def test_symbols_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        '"""Doc."""\nX = 1\ndef f(): ...\nclass C:\n    y = 2\n'
        "    @property\n    def p(self): ...\n"
        "    @p.setter\n    def p(self, v): ...\n"
    )
    assert set(delta.symbols(path)) == {"<module>", "f", "C", "C.p"}


def test_a_broken_declaration_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "ROOT", tmp_path)
    folder = tmp_path / "milestones" / "m9_nine"
    folder.mkdir(parents=True)
    for text, message in (
        ("below = ", "DELTA.toml"),
        ('below = "m8"\n[added]\n"a.py" = ""', "a.py"),
    ):
        (folder / "DELTA.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            delta.declared("m9_nine")


ONE = '[[stop]]\ntitle = "One"\nsymbols = ["shelf.py"]\n'


def declared(root: Path, stops: str) -> delta.Delta:
    """Return the delta of the small ladder, with these stops."""
    ladder(root, declared=DELTA.replace("\n", f"\n{stops}\n", 1))
    return delta.declared("m2_mini", root)


def test_the_first_of_two_equal_names_decides(tmp_path: Path) -> None:
    stops = "".join(
        f'[[stop]]\ntitle = "{title}"\nsymbols = ["shelf.py:Shelf", "shelf.py:{more}"]\n'
        for title, more in (("One", "Shelf"), ("Two", "more"))
    )
    assert declared(tmp_path, stops).stops == {
        "One": ("shelf.py:Shelf.put", "shelf.py:Shelf.gone"), "Two": ("shelf.py:more",)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ('[[stop]]\ntitle = "A"\nsymbols = ["shelf.py:Shelf.putt"]', "'A' names 'shelf.py:Shelf.p"),
        ('[[stop]]\ntitle = "A"\nsymbols = ["shelf.py:mor"]', "'A' names 'shelf.py:mor', which is"),
        ('[[stop]]\ntitle = "A"\nsymbols = []', "'A' has no symbol"),
        ('[[stop]]\ntitle = "A"', "each .*stop.* has a title and a list of symbols"),
        ('[stop]\ntitle = "A"\nsymbols = ["shelf.py"]', "each .*stop.* has a title"),
        ('[[stop]]\ntitle = "The rest"\nsymbols = ["shelf.py"]', "not 'The rest'"),
        (ONE + ONE, "each stop needs a title of its own"),
        (f'{ONE}[[stop]]\ntitle = "Z"\nsymbols = ["shelf.py"]', "'Z' has no symbol that is not in"),
    ],
)
def test_a_wrong_stop_is_named_with_its_file(stops: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"m2_mini/DELTA.toml: .*{message}"):
        declared(tmp_path, stops)
