"""Each *Break it* of a handout does what the handout says. `break` and `predict` for students."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common import Request
from m1_single import LLMEngine
from m1_single.scheduler import Scheduler
from m5_overlap import engine as m5_engine
from m5_overlap.in_flight import StepsInFlight
from milestones.chain import place
from milestones.course import catalog
from milestones.course.exercise import Exercise
from milestones.course.student import break_it, break_screen, predict
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import ROOT, shared_model
from tests.engine.test_overlap import fuzz
from tests.helpers import mini_course
from tests.helpers.deselected import thorough_except
from tests.helpers.fake_overlap import HashRunner
from tests.helpers.mini_course import Say
from tests.helpers.oracle import greedy

EXERCISES = [e for name in catalog.taught_engines(ROOT) for e in catalog.load(name)]
SOURCE = "m2_mini/shelf.py"


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> break_it.Patches:
    tree = tmp_path_factory.mktemp("patches") / "tree"
    return break_it.Patches(ROOT, tree, mini_course.shared_runner())


@pytest.mark.parametrize(
    "exercise",
    thorough_except(("m2.2",), EXERCISES, "it runs the tests and an engine on each mutant"),
    ids=lambda exercise: exercise.id,
)
def test_a_mistake_does_what_the_record_says(exercise: Exercise, patches: break_it.Patches) -> None:
    """All tests that fail are listed, and so is what happens to the answers of an engine."""
    effect = patches.effect(exercise)
    assert effect.right and not any(result["error"] for result in effect.right.values())
    assert effect.run.error is None
    assert (effect.red, effect.answers) == (exercise.red, exercise.answers), exercise.id


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_a_handout_names_the_tests_that_fail(exercise: Exercise) -> None:
    """The answer names every one of them, unless it says how many there are."""
    question, answer = exercise.part("Break it", ROOT)
    assert question and answer
    named = dict.fromkeys(re.findall(r"`(test_\w+)`", answer))
    assert named.keys() <= {*exercise.red}, "the answer names a test that does not fail"
    if named.keys() != {*exercise.red}:
        assert f"{len(exercise.red)} tests" in " ".join(answer.split())
    if "Which test goes red" in " ".join(question.split()):
        assert len(exercise.red) == 1, "the question asks for one test"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_every_exercise_asks_for_a_prediction(exercise: Exercise) -> None:
    question, answer = exercise.part("Predict", ROOT)
    assert question and answer and "<details>" not in question + answer


def test_what_the_mistake_of_m1_3_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step fails, and the others compute all tokens again. The answer is right."""
    costs, answers = [], []
    update = Scheduler.update_from_output

    def one_too_many(self: Scheduler, batch: Any, sampled: Any) -> Any:
        outputs = update(self, batch, sampled)
        for request in batch.requests:
            request.num_computed_tokens += 1
        return outputs

    for mistaken in (False, True):
        if mistaken:
            monkeypatch.setattr(Scheduler, "update_from_output", one_too_many)
        engine = LLMEngine(loaded=shared_model("tiny-llama"))
        engine.add_request([1, 2, 3], greedy(12, ignore_eos=True))
        outputs = []
        while engine.has_unfinished_requests():
            outputs.append(engine.step())
        stats = engine.stats()
        costs.append((len(outputs), stats.prefill_tokens + stats.decode_tokens))
        answers.append(outputs[-1][0].outputs[0].token_ids)
    assert costs == [(12, 14), (18, 102)] and answers[0] == answers[1]


@pytest.mark.parametrize(("stream", "writes"), [(LateStream, True), (EarlyStream, False)])
def test_where_m5_3_writes_to_a_free_page(
    monkeypatch: pytest.MonkeyPatch, stream: type[LateStream], writes: bool
) -> None:
    """With its mistake, step N+1 writes to a free page on the late stream only. No answer changes,
    as runs without the audit show: `fuzz` compares every answer."""

    def free_at_once(self: StepsInFlight, request: Request) -> None:
        self.kv_cache.free(request)

    monkeypatch.setattr(StepsInFlight, "free", free_at_once)
    found = set()
    for seed in range(40):
        try:
            fuzz(m5_engine, seed, stream)
        except AssertionError as error:
            found.add(str(error).partition("\n")[0])
    assert found == ({"I3: a free page is written"} if writes else set())
    monkeypatch.setattr(HashRunner, "_compute", unaudited(HashRunner._compute))
    for seed in range(40):
        fuzz(m5_engine, seed, stream)


def unaudited(compute: Callable[..., None]) -> Callable[..., None]:
    """Return a forward of the hash model that does not mind a write to a free page."""

    def computed(self: HashRunner, *args: object) -> None:
        self.free_pages = []
        compute(self, *args)

    return computed


@pytest.fixture
def solved(tree: Path) -> Path:
    (tree / SOURCE).write_text(mini_course.SHELF)
    return tree


def saving(solved: Path, *texts: str) -> Callable[[object], Iterator[None]]:
    """Return a stand-in for `changes`: the student saves these texts, then presses Ctrl-C."""

    def saved(_: object) -> Iterator[None]:
        yield
        for text in texts:
            (solved / SOURCE).write_text(text)
            yield
        raise KeyboardInterrupt

    return saved


def test_a_student_makes_the_mistake_and_gets_the_file_back(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = mini_course.SHELF.replace(">= ROOM", "> ROOM")
    monkeypatch.setattr(break_it, "changes", saving(solved, "def (", mistake))
    status, said = say(break_it, "m2.1")
    assert status == 0 and "1 of 2 tests fail:\n  test_a_full_shelf_refuses\n" in said
    assert "This is what the handout's mistake does." in said
    assert (solved / SOURCE).read_text() == mini_course.SHELF
    assert (solved / ".ladder/m2.1.mistake/shelf.py").read_text() == mistake
    kept = (solved / "ANSWERS.md").read_text()
    assert "### Break it\n\n```text\n1 of 2 tests fail:\n  test_a_full_shelf_refuses\n" in kept
    monkeypatch.setattr(break_it, "changes", saving(solved, mistake))
    say(break_it, "m2.1")
    assert (solved / "ANSWERS.md").read_text() == kept, "the same report is kept once"


def test_the_mistake_of_an_elective_is_made_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command watches the elective's files, and puts them back."""
    root = mini_course.make_elective(tmp_path / "course")
    source = root / place("extra") / "shelf.py"
    watched = []

    def saved(folders: list[Path]) -> Iterator[None]:
        watched.extend(folders)
        yield
        source.write_text(mini_course.SHELF.replace(">= ROOM", "> ROOM"))
        yield

    monkeypatch.setattr(break_it, "changes", saved)
    status = mini_course.called(break_it, root, "extra.1", runner=mini_course.shared_runner())
    said = capsys.readouterr().out
    assert "1 of 2 tests fail:\n  test_a_full_shelf_refuses\n" in said
    assert (status, watched) == (0, [source.parent])
    assert source.read_text() == mini_course.SHELF


def test_another_mistake_is_told_apart(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = mini_course.SHELF.replace("return len(self.items)", "return 0")
    monkeypatch.setattr(break_it, "changes", saving(solved, wrong))
    status, said = say(break_it, "m2.1")
    words = " ".join(said.split())
    assert status == 1
    assert "these should fail, and pass: test_a_full_shelf_refuses" in words
    assert "These fail, and should pass: test_items_are_counted" in words


def test_the_same_mistake_may_break_more_tests(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a solution that is written in another way, it reaches other tests too."""
    both = mini_course.SHELF.replace(">= ROOM", "> ROOM").replace("len(self.items)\n", "0\n")
    monkeypatch.setattr(break_it, "changes", saving(solved, both))
    status, said = say(break_it, "m2.1")
    assert status == 0 and "This is what the handout's mistake does." in said
    assert "more tests fail than in ours: test_items_are_counted" in " ".join(said.split())


def test_what_does_not_pass_cannot_be_broken(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(break_it, "changes", saving(solved))
    status, said = say(break_it, "m2.1")  # Ctrl-C: nothing was saved
    assert status == 2 and "nothing was tried" in said
    (solved / SOURCE).write_text(mini_course.SHELF.replace(">= ROOM", "> ROOM"))
    assert "m2.1 does not pass yet" in say(break_it, "m2.1")[1]
    assert say(break_it, "m2.9")[0] == 2 and say(break_it, "m2.2")[0] == 2


def test_the_first_difference_is_marked() -> None:
    assert break_screen.marked([1, 2, 3], [1, 5, 3], "red").spans[0].start == len("1 ")
    assert break_screen.marked([1, 2], [1, 2, 3], "red").plain.strip() == "1 2"


def test_a_prediction_is_kept_before_the_answer_is_shown(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    status, said = say(predict, "m2.1")
    assert status == 1 and "How many fit?" in said and "Three of them" not in said
    assert not (solved / "ANSWERS.md").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("two,\nperhaps\n\nnot read"))
    status, said = say(predict, "m2.1")
    assert status == 0 and "kept in ANSWERS.md" in said and "Three of them" in said
    text = (solved / "ANSWERS.md").read_text()
    assert text.count("\n### Prediction\n") == 2 == text.count("\n### Checkpoint\n")
    assert "## m2.1: Put it there\n\n### Prediction\n\ntwo,\nperhaps\n\n### Break it" in text


def test_what_was_written_is_not_asked_for_again(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call shows the prediction and the answer. Other parts of the file stay."""
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n"))
    say(predict, "m2.1")
    path = solved / "ANSWERS.md"
    path.write_text(path.read_text().replace("### Checkpoint", "### Checkpoint\n\nBecause.", 1))
    before = path.read_text()
    status, said = say(predict, "m2.1")
    assert status == 0 and "two" in said and "Three of them" in said
    assert path.read_text() == before
    assert say(predict, "m2.2")[0] == 2, "its section has no prediction"


def test_a_section_that_was_deleted_is_written_again(
    solved: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    (solved / "ANSWERS.md").write_text("# My notes\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n"))
    assert say(predict, "m2.1")[0] == 0
    text = (solved / "ANSWERS.md").read_text()
    assert text.startswith("# My notes\n\n## m2.1: Put it there\n\n### Prediction\n\ntwo\n")
