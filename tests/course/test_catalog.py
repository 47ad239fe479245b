"""The catalog of the exercises: an error in it is reported with file and entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from milestones.chain import course_place, find_engine, is_elective
from milestones.course import catalog
from milestones.staff.maintain.handouts import refreshed, tour_of
from tests.conftest import ROOT
from tests.helpers import mini_course

CATALOG = "milestones/m2_mini/exercises.toml"


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str, str], str]:
    """`broken(old, new)` returns the error of `load` after one replacement in the small catalog."""
    mini_course.make(tmp_path)

    def message(old: str, new: str) -> str:
        assert old in mini_course.CATALOG
        text = mini_course.CATALOG.replace(old, new)
        (tmp_path / CATALOG).write_text(text)
        with pytest.raises(catalog.CatalogError) as caught:
            catalog.load("m2_mini", tmp_path)
        return str(caught.value)

    return message


def test_a_record_is_read(tmp_path: Path) -> None:
    first, second = catalog.load("m2_mini", mini_course.make(tmp_path))
    assert (first.id, first.points, first.hours, first.requires) == ("m2.1", 10, 0.5, ())
    assert second.requires == ("m2.1",)
    assert second.section == "milestones/m2_mini/README.md#m22-count-them-all"
    assert second.sources == ("m2_mini/shelf.py",)
    assert catalog.closure(second, (first, second)) == {"m2.1"}
    assert catalog.find("m2.2", tmp_path) == second
    assert find_engine("m2", tmp_path) == "m2_mini"
    assert catalog.taught_engines(tmp_path) == ["m2_mini"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("points = 5", 'points = "5"', "m2.2: points must be a whole number"),
        ("points = 5", "points = 0", "m2.2: points must be above 0"),
        ("points = 10", "points = true", "m2.1: points must be a whole number"),
        ("points = 10", "point = 10", "m2.1: unknown key 'point'"),
        ("hours = 0.25", "", "m2.2: hours is missing"),
        ('title = "Put it there"', 'title = ""', "m2.1: title must be one line"),
        ('"Not sum.", ', "", "m2.2: there must be exactly three hints, not 2"),
        ("shelf.py:largest", "shelf.py:biggest", "no symbol 'biggest'"),
        ("shelf.py:largest", "desk.py:largest", "there is no m2_mini/desk.py"),
        ("shelf.py:largest", "shelf.py:Shelf", "shelf.py:Shelf is no function"),
        ("shelf.py:largest", "shelf.py:Shelf.put", "named more than once"),
        ("test_m2_2.py", "test_m2_9.py", "there is no file"),
        ("test_m2_2.py", "test_m2_2.py::test_x", "has no test_x"),
        ("test_m2_2.py", "__init__.py", "the file has no test"),
        ("test_m2_2.py", "test_m2_1.py::test_items_are_counted", "to m2.1 too"),
        ('id = "m2.2"', 'id = "m2.1"', "another exercise with this id"),
        ('id = "m2.2"', 'id = "m2.3"', "this one must be m2.2"),
        ('requires = ["m2.1"]', 'requires = ["m2.2"]', "m2.2, which is later"),
        ('requires = ["m2.1"]', 'requires = ["m2.7"]', "m2.7, which is unknown"),
        ('requires = ["m2.1"]', 'requires = "m2.1"', "must be a list of texts"),
    ],
)  # fmt: skip
def test_an_error_names_file_and_entry(
    broken: Callable[[str, str], str], old: str, new: str, said: str
) -> None:
    message = broken(old, new)
    assert message.startswith(f"{CATALOG}: m2.") and said in message


def test_everything_wrong_is_said_at_once(broken: Callable[[str, str], str]) -> None:
    message = broken("points", "pints")
    assert len(message.splitlines()) == 4  # an unknown key and a missing key in each of 2 entries


def test_a_file_that_is_no_toml_is_named(broken: Callable[[str, str], str]) -> None:
    assert broken("points = 5", "points =").startswith(f"{CATALOG}: ")
    assert "unknown tables ['exercises']" in broken("[[exercise]]", "[[exercises]]")


def test_what_there_is_is_listed(tmp_path: Path) -> None:
    mini_course.make(tmp_path)
    for name, said in (("m2.3", "m2_mini has m2.1, m2.2"), ("m9.1", "with exercises: m2_mini")):
        with pytest.raises(catalog.CatalogError, match=said):
            catalog.find(name, tmp_path)
    with pytest.raises(ValueError, match="there are m1_mini, m2_mini"):
        find_engine("m9", tmp_path)
    with pytest.raises(catalog.CatalogError, match="m1_mini has no exercises"):
        catalog.load("m1_mini", tmp_path)


def test_a_mutant_is_read(tmp_path: Path) -> None:
    (mutant,) = catalog.mutants("m2_mini", mini_course.make(tmp_path))
    assert (mutant.name, mutant.exercise) == ("one_too_many", "m2.1")
    assert mutant.killed_by.endswith("::test_a_full_shelf_refuses")
    assert mutant.patch.startswith("--- a/m2_mini/shelf.py\n+++ b/")


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("Mutant: ", "Mutated: ", 1, 'must read "Mutant: ..."'),
        ("one_too_many", "one-too-many", 1, "one-too-many must be in snake_case"),
        ("Exercise: m2.1", "Exercise: m2.9", 2, "there is no exercise m2.9"),
        ("Mistake: A", "A", 3, 'must read "Mistake: ..."'),
        ("::test_a_full", "::test_an_empty", 4, "has no test_an_empty"),
        ("::test_a_full_shelf_refuses", "", 4, "must be the node id of a test"),
        ("test_m2_1.py::test_a_full_shelf_refuses", "test_m2_2.py::test_the_sum", 4, "not among"),
        ("refuses\n\n", "refuses\n", 5, "an empty line"),
        ("--- a/m2_mini", "--- m2_mini", 6, "must begin with --- a/m2_mini/"),
        ("+++ b/m2_mini", "+++ m2_mini", 7, "must go on with +++ b/m2_mini/"),
        ('"no room")\n', '"no room")\n\nmutant: next\n', 14, "no line of a diff"),
        (mini_course.MUTANT, f"{mini_course.MUTANT}\n{mini_course.MUTANT}", 14, "another mutant"),
    ],
)
def test_a_bad_mutant_is_refused(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    path = catalog.patches_of("m2_mini", mini_course.make(tmp_path))
    assert old in mini_course.MUTANT
    path.write_text(mini_course.MUTANT.replace(old, new))
    with pytest.raises(catalog.CatalogError) as caught:
        catalog.mutants("m2_mini", tmp_path)
    assert f"m2_mini/mutants.patch:{line}: " in str(caught.value) and said in str(caught.value)


def test_an_unknown_mutant_is_refused() -> None:
    with pytest.raises(catalog.CatalogError, match="m1_single has no mutant two_too_many"):
        catalog.find_mutant("m1_single", "two_too_many")


def test_the_records_of_the_milestones() -> None:
    """Each real catalog is valid, and each exercise has mutants."""
    for milestone in catalog.taught_engines(ROOT):
        exercises = catalog.load(milestone)
        mutants = catalog.mutants(milestone)
        assert {mutant.exercise for mutant in mutants} == {exercise.id for exercise in exercises}


@pytest.mark.parametrize("name", catalog.taught_engines(ROOT))
def test_each_exercise_has_wrong_solutions(name: str) -> None:
    """A file for each exercise, and no solution that `mutants.patch` has already."""
    least = 3 if is_elective(name) else 5
    found = Counter(solution.exercise for solution in catalog.wrong_solutions(name))
    few = {e.id: found[e.id] for e in catalog.load(name) if found[e.id] < least}
    assert not few, f"each exercise of {name} has {least} wrong solutions: {few}"
    files = sorted(path.stem for path in (ROOT / course_place(name)).glob("wrong_solutions/*"))
    assert files == sorted(found), "a file is named as its exercise"
    mutants = {mutant.name: mutant.patch for mutant in catalog.mutants(name)}
    for solution in catalog.wrong_solutions(name):
        assert solution.name not in mutants and solution.patch not in mutants.values(), (
            f"{solution.name} is among the mutants already"
        )


@pytest.mark.parametrize("name", catalog.taught_engines(ROOT))
def test_a_handout_has_what_the_record_has(name: str) -> None:
    """`exercises.toml` and the stops of `DELTA.toml` are the only sources of these parts."""
    handout = (ROOT / course_place(name) / "README.md").read_text(encoding="utf-8")
    assert refreshed(handout, catalog.load(name), tour_of(name)) == handout, (
        "write it again: python -m milestones.staff.maintain.handouts"
    )


def test_parts_of_a_handout_are_written() -> None:
    """What is old is replaced, the rest stays, and no line of a hint begins a list."""
    exercise = replace(
        catalog.find("m2.2"), title="New", requires=(), summary="Join.", symbols=("a.py:A.b",),
        hints=("One.", f"{'x' * 105} - 1 - y", "`a` and\n`b`"),
    )  # fmt: skip
    run = "**Run.** `python -m milestones check m2.2 --watch`. Then\nwait.\n\n"
    why = "**Why.** It pays.\n\n**Task.** Write.\n\n"
    old = f"# M\n\n## The exercises\n\n## m2.2: Old\n\n*1 point.*\n\n{why}{run}**Break it.** Do.\n"
    new = refreshed(old, (exercise,))
    assert "\n| [m2.2](#m22-new) | New | 20 | 1.5 | `b` |\n| | | 20 | 1.5 | |\n\n" in new
    assert f"\n## m2.2: New\n\n*20 points · about 1.5 hours.* Join.\n\n{why}{run}<details>" in new
    assert f"\n\n{'x' * 105} -\n1 - y\n\n</details>\n" in new
    assert new.endswith("\n\n`a` and `b`\n\n</details>\n\n**Break it.** Do.\n")
    assert refreshed(new, (exercise,)) == new
    with pytest.raises(ValueError, match="one place for '## m2.2: New', not 0"):
        refreshed(old.replace("## m2.2", "## m2.1"), (exercise,))
