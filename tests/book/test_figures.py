"""The live figures: what they draw, their limits, and that plain Python runs them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from milestones.book import core_run
from milestones.book.figures import NAMES, drawn, figure
from milestones.book.figures.batches import continuous, static
from tests.house.test_plain_data import run_without_a_model

DRAW_ALL = """
from milestones.book.figures import NAMES, drawn
for name in NAMES:
    drawn(name, "{}")
"""


def extremes(name: str) -> list[dict[str, Any]]:
    """Return the first values, those of the question, and each control at both ends."""
    shown = figure(name)
    found: list[dict[str, Any]] = [{}, dict(shown.asked)]
    for control in shown.controls:
        if control.name == "code":
            found.append({"code": "def schedule(self):\n    return ScheduleBatch([], [])"})
        elif control.kind == "text":
            found += [{control.name: "a"}, {control.name: "a b c\n" * 8}]
        else:
            high = len(control.choices) - 1 if control.choices else control.high
            found += [{control.name: control.low}, {control.name: high}]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_draws_whatever_its_controls_allow(name: str) -> None:
    for values in extremes(name):
        shown = figure(name).shown(values)
        root = ET.fromstring(shown.svg)
        assert len(list(root)) > 2 and root.get("aria-label") == shown.words, values


@pytest.mark.parametrize("name", NAMES)
def test_the_first_drawing_does_not_tell_the_answer(name: str) -> None:
    shown = figure(name)
    first, asked = shown.shown({}), shown.shown(shown.asked)
    assert first.answer != asked.answer
    assert not re.search(rf"\b{asked.answer}\b", shown.question)
    assert json.loads(drawn(name, json.dumps(dict(shown.asked))))["answer"] == asked.answer


def test_values_outside_the_limits_are_refused() -> None:
    for values, words in (({"tokens": 17}, "1 to 16"), ({"cache": "1"}, "'1'"), ({"x": 1}, "'x'")):
        with pytest.raises(ValueError, match=words):
            figure("triangle").shown(values)
    for text in ("a\n" * 9, "a" * 61, " \n"):
        with pytest.raises(ValueError, match="lines of 60|at least one"):
            figure("prefixes").shown({"prompts": text})
    with pytest.raises(ValueError, match="triangle, batches"):
        figure("circle")


def test_figures_need_no_model() -> None:
    """What runs in a browser has neither torch nor any other package of ours."""
    done = run_without_a_model(DRAW_ALL)
    assert done.returncode == 0, done.stderr


def test_a_static_batch_ends_before_the_next_begins() -> None:
    arrivals = dict.fromkeys("ABCD", 0)
    run = static(2, arrivals)
    joined = [next(n for n, step in enumerate(run) if name in step.computed) for name in "ABCD"]
    assert joined == [0, 0, 12, 12], "A generates 12 tokens, in 12 steps"
    assert len(continuous(2, arrivals)) < len(run)
    late = continuous(2, arrivals | {"D": 20})
    assert any(not step.computed for step in late) and late[-1].computed.keys() == {"D"}


def test_without_overlap_a_step_takes_host_and_forward() -> None:
    costs = core_run.StepCosts(host=1, host_row=0, forward=3, forward_token=0)
    for milestone, settings in (("m4", {}), ("m5", {"enable_overlap": False})):
        core = core_run.make_core(milestone, costs=costs, **settings)
        run = list(core_run.steps(core, {"A": core_run.request_of("A", 4, 5)}))
        assert core.runner.now == pytest.approx(5 * 4), milestone
        assert [step.tokens for step in run] == [["A"]] * 5


def test_a_run_without_progress_ends() -> None:
    core = core_run.make_core("m3")
    core.step = list
    with pytest.raises(AssertionError, match="I5"):
        list(core_run.steps(core, {"A": core_run.request_of("A", 4, 5)}))


def test_an_edit_that_breaks_an_invariant_is_named_with_its_step_and_line() -> None:
    for code, words in {
        "def (": "Step 1, line 1 of your code: SyntaxError",
        "x = 1": "Step 1: KeyError",
        "def schedule(self):\n    return 1 / 0": "Step 1, line 2 of your code: ForwardError|Zero",
        "def schedule(self):\n    return ScheduleBatch([], [])": "I5",
        "def schedule(self):\n    self.running.append(self.waiting.popleft())\n"
        "    return ScheduleBatch([], [])": "Step 1: AssertionError: I3",
    }.items():
        assert re.search(words, figure("schedule").shown({"code": code}).words), code
