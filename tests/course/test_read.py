"""`read` shows an exercise of the handout with its answers folded."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from milestones.course import catalog
from milestones.course.student import predict, read
from milestones.course.student.answers_file import PREDICTION, title_of, write, written
from milestones.course.student.section import Section, sections_of
from tests.conftest import ROOT
from tests.helpers.mini_course import Say

EXERCISES = [e for name in catalog.taught_engines(ROOT) for e in catalog.load(name)]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_a_section_is_shown_without_its_answers(exercise: catalog.Exercise) -> None:
    [section] = sections_of(exercise.id)
    said = shown(section.name)
    words = " ".join(said.split())
    for part in ("Predict.", "Task.", "Break it.", "Checkpoint."):
        assert part in words, part
    for name in ("Predict", "Break it"):
        answer = " ".join(exercise.part(name, ROOT)[1].replace("`", "").replace("*", "").split())
        assert len(answer) > 40 and answer[:40] not in words, name
    assert "<details>" not in said and "](" not in said
    assert f"milestones hint {exercise.id}" in words and f"milestones break {exercise.id}" in words
    assert section.predictions and max(map(len, said.splitlines())) <= 80


def shown(name: str, *, answers: bool = False) -> str:
    console = Console(width=80, file=io.StringIO())
    for section in sections_of(name):
        read.show(console, section, ROOT, asks=False, answers=answers)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_links_become_text_and_code_stays() -> None:
    [piece] = Section(
        "m3_paged", "m3", "", "`f[(3,)](x)`, [`a`](../b.py), [c](../README.md)"
    ).pieces
    assert piece.text == "`f[(3,)](x)`, `a`, c: `milestones/README.md`"


def test_the_sections_of_no_exercise_are_those_of_a_milestone() -> None:
    titles = [section.title for section in sections_of("m3")]
    assert "Measure it" in titles and not any(title.startswith("m3.") for title in titles)
    assert "page size" not in shown("m3") and "page size" in shown("m3", answers=True)


def test_week_6_is_read_and_predicted_as_the_handouts_are(tmp_path: Path) -> None:
    [section] = sections_of("project")
    prediction, of_vllm = section.predictions
    assert "vLLM" in of_vllm.question
    answer = " ".join(prediction.answer.split())[:25]
    assert answer not in " ".join(shown("project").split())
    assert answer in " ".join(shown("project", answers=True).replace("*", "").split())
    write(tmp_path, section.milestone, section.title, prediction.part, "a half")
    assert written(tmp_path, section.milestone, section.title, prediction.part) == "a half"


def test_at_a_terminal_a_prediction_unfolds_the_answer(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(width=80, file=io.StringIO())
    [section] = sections_of("m2.1", tree)
    for typed, kept in (("\n", ""), ("two\n\n", "two")):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        read.show(console, section, tree, asks=True, answers=False)
        assert isinstance(console.file, io.StringIO)
        assert "Three of them" in console.file.getvalue()
        assert written(tree, "m2_mini", section.title, PREDICTION) == kept


def test_in_a_pipe_nothing_is_asked(tree: Path, say: Say) -> None:
    status, said = say(read, "m2.1")
    assert status == 0 and "How many fit?" in said and "Three of them" not in said
    assert "predict m2.1" in said and "--answers" in said
    assert "Three of them" in say(read, "m2.1", "--answers")[1]
    assert say(read, "m2.9")[0] == 2 and not (tree / "ANSWERS.md").exists()


def test_every_question_of_a_handout_has_its_place(
    tree: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two questions of one section are kept apart. Text of the student stays."""
    page = tree / "milestones/m2_mini/README.md"
    question = (
        "**Predict.** How {0}?\n\n<details><summary>Answer</summary>\n\n{0}!\n\n</details>\n\n"
    )
    page.write_text(
        page.read_text() + "\n## Measure it\n\n" + question.format("far") + question.format("long")
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("a mile\n\nan hour\n\n"))
    status, said = say(predict, "m2")
    assert status == 0 and "far!" in said and said.index("far!") < said.index("long!")
    text = (tree / "ANSWERS.md").read_text()
    assert "## Measure it\n\n### Prediction\n\na mile\n\n### Prediction 2\n\nan hour\n" in text
    [exercise, _] = catalog.load("m2_mini", tree, strict=False)
    write(tree, "m2_mini", title_of(exercise), "Checkpoint", "Because.")
    write(tree, "m2_mini", title_of(exercise), "Checkpoint", "Really.")
    assert "### Checkpoint\n\nBecause.\n\nReally.\n\n## m2.2" in (tree / "ANSWERS.md").read_text()
